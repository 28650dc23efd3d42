"""The site's URLs: the start page, one page for each app, and the admin."""

from django.conf import settings
from django.conf.urls.static import static
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView, TemplateView

urlpatterns = [
    path("", TemplateView.as_view(template_name="home.html"), name="home"),
    # The admin's pages name no icon, so browsers ask for this one.
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}lock.svg")),
    path("feeds/", include("feeds.urls")),
    path("accounts/", include("accounts.urls")),
    path("orders/", include("orders.urls")),
    path("digests/", include("digests.urls")),
    path("albums/", include("albums.urls")),
    path("admin/", admin.site.urls),
    *static(settings.MEDIA_URL, document_root=settings.MEDIA_ROOT),
]
