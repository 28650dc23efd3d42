"""The form of a new album."""

from __future__ import annotations

from typing import Any, Final

from django import forms
from django.core.files.uploadedfile import UploadedFile
from django.template.defaultfilters import filesizeformat

from .models import Album

#: Pictures of one album, at most.
MOST_PICTURES: Final = 24
#: Largest picture, bytes and pixels.
MAX_BYTES: Final = 10 * 1024 * 1024
MAX_PIXELS: Final = 40_000_000


class PicturesInput(forms.ClearableFileInput):
    """A file input that takes several."""

    allow_multiple_selected = True


class PicturesField(forms.ImageField):
    """
    Several pictures.

    Only their beginnings are looked at here, as that is quick; whether they are whole
    is found by the first stage.
    """

    widget = PicturesInput

    def clean(self, data: Any, initial: Any = None) -> list[UploadedFile[bytes]]:
        """Return the pictures; one that is none makes all of them invalid."""
        files = data if isinstance(data, list | tuple) else [data]
        if len(files) > MOST_PICTURES:
            raise forms.ValidationError(f"At most {MOST_PICTURES} pictures.")
        return [self._clean_one(file, initial) for file in files or [None]]

    def _clean_one(self, file: Any, initial: Any) -> UploadedFile[bytes]:
        if file is not None and file.size > MAX_BYTES:
            raise forms.ValidationError(f"{file.name} has more than {filesizeformat(MAX_BYTES)}.")
        try:
            cleaned: Any = super().clean(file, initial)
        except forms.ValidationError as error:
            if file is None:
                raise
            raise forms.ValidationError([f"{file.name}: {text}" for text in error]) from None
        width, height = cleaned.image.size
        if width * height > MAX_PIXELS:
            raise forms.ValidationError(f"{file.name} has more than {MAX_PIXELS:,} pixels.")
        return cleaned  # type: ignore[no-any-return]


class AlbumForm(forms.ModelForm):  # type: ignore[type-arg] # not generic at run time
    """Title, e-mail address and pictures of a new album."""

    pictures = PicturesField(help_text=f"JPEG, PNG, WebP, … Up to {MOST_PICTURES} at once.")

    class Meta:
        model = Album
        fields = ("title", "email")
        help_texts = {"email": "We write once, when the album is ready."}
