"""The page of digests: a button to press too often, and the records of what was done."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from django_celery_safe.models import IdempotencyRecord

from .tasks import mail_digest, send_digests


@require_http_methods(["GET", "POST"])
def digest_list(request: HttpRequest) -> HttpResponse:
    """Show which digests were mailed; send those of today."""
    if request.method == "POST":
        sent = send_digests()
        messages.info(request, f"{sent} digest(s) were handed to the workers.")
        return redirect("digests:list")
    ours = IdempotencyRecord.objects.filter(key__startswith=f"{mail_digest.name}:")
    return render(
        request, "digests/digest_list.html", {"records": ours.order_by("-claimed_at")[:10]}
    )
