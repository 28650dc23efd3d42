"""A shop with one product, and its orders."""

from django.db import models
from django.utils import timezone


class Product(models.Model):
    """Something to buy."""

    name = models.CharField(max_length=80, unique=True)
    stock = models.PositiveIntegerField()

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """One piece of a product for somebody."""

    product = models.ForeignKey(Product, models.CASCADE)
    email = models.EmailField("your e-mail address")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    shipped_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{self.product} for {self.email}"
