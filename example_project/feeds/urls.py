"""URLs of the feeds."""

from django.urls import path

from . import views

app_name = "feeds"

urlpatterns = [
    path("", views.feed_list, name="list"),
    path("samples/<str:name>", views.sample, name="sample"),
]
