"""The site's URLs."""

from django.conf import settings
from django.conf.urls.static import static
from django.contrib import admin
from django.urls import include, path
from django.views.generic import TemplateView

urlpatterns = [
    path("", TemplateView.as_view(template_name="home.html"), name="home"),
    path("accounts/", include("accounts.urls")),
    path("feeds/", include("feeds.urls")),
    path("albums/", include("albums.urls")),
    path("admin/", admin.site.urls),
    # With DEBUG alone: elsewhere it is a matter of the web server.
    *static(settings.MEDIA_URL, document_root=settings.MEDIA_ROOT),
]
