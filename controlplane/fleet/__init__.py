"""Islands: enrolment, heartbeats, sync reports, challenges and what follows from them."""
