"""The view that the golden files hold rows of."""

from streams import Entity, EventSource, FeatureView, count, entropy, last, mean, sum_

user = Entity("user", key="user_id")
shop = EventSource("shop.events", contract="shop_event@1", max_out_of_orderness="5s", max_future_skew="1m")
activity = FeatureView(
    "user_activity",
    version=3,
    entity=user,
    source=shop,
    slide="1m",
    allowed_lateness="30s",
    owner="growth",
    features={
        "clicks_2m": count(where="event_type == 'click'").over("2m"),
        "spend_2m": sum_("amount", where="event_type == 'order'").over("2m"),
        "mean_amount_1m": mean("amount").over("1m"),
        "category_entropy_3": entropy("category").over(last=3),
        "last_category": last("category").over(lifetime=True),
    },
)
