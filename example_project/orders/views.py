"""The page of the shop: one button, the stock, and the orders with what became of them."""

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from .models import Order, Product
from .tasks import place_order


class OrderForm(forms.ModelForm):  # type: ignore[type-arg] # not generic at run time
    """The customer's address."""

    class Meta:
        model = Order
        fields = ("email",)


@require_http_methods(["GET", "POST"])
def order_list(request: HttpRequest) -> HttpResponse:
    """Show the latest orders; take a new one."""
    form = OrderForm(request.POST or None)
    if not form.is_valid():
        orders = Order.objects.select_related("product")[:10]
        page = {"form": form, "orders": orders, "product": Product.objects.first()}
        return render(request, "orders/order_list.html", page)
    order = place_order(form.cleaned_data["email"])
    messages.info(request, f"Order {order.pk} is saved, and so is the message that ships it.")
    return redirect("orders:list")
