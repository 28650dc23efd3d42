"""URLs of the albums."""

from django.urls import path

from . import views

app_name = "albums"

urlpatterns = [
    path("", views.album_list, name="list"),
    path("sample/", views.make_sample, name="sample"),
    path("<int:pk>/", views.album_detail, name="detail"),
    path("<int:pk>/progress.json", views.progress, name="progress"),
    path("<int:pk>/resume/", views.resume, name="resume"),
    path("<int:pk>/abort/", views.abort, name="abort"),
    path("<int:pk>/pictures/<int:picture>/remove/", views.remove, name="remove"),
]
