"""URLs of the albums."""

from django.urls import path

from . import views

app_name = "albums"

urlpatterns = [
    path("", views.album_list, name="list"),
    path("<int:pk>/", views.album_detail, name="detail"),
    path("<int:pk>/resume/", views.change, {"action": "resume"}, name="resume"),
    path("<int:pk>/abort/", views.change, {"action": "abort"}, name="abort"),
]
