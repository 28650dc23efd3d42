"""The site's URLs."""

from django.conf import settings
from django.conf.urls.static import static
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from . import views

urlpatterns = [
    path("", views.home, name="home"),
    path("activity/", views.show_activity, name="activity"),
    # The admin's pages name no icon, so browsers ask for this one.
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}lock.svg")),
    path("accounts/", include("accounts.urls")),
    path("feeds/", include("feeds.urls")),
    path("albums/", include("albums.urls")),
    path("admin/", admin.site.urls),
    # With DEBUG alone: elsewhere it is a matter of the web server.
    *static(settings.MEDIA_URL, document_root=settings.MEDIA_ROOT),
]
