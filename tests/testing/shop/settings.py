"""Its settings: locks in a real Redis, a broker that is not there."""

import json
import os

SECRET_KEY = "for tests only"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django_celery_safe", "shop"]
DATABASES = {"default": json.loads(os.environ["SHOP_DATABASE"])}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": os.environ["SHOP_CACHE"],
    }
}
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ["SHOP_BROKER"]
