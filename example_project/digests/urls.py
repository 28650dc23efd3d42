"""URLs of the digests."""

from django.urls import path

from . import views

app_name = "digests"

urlpatterns = [path("", views.digest_list, name="list")]
