//! Schedules with sense: programs as people write them, whose tasks restart at the worst moments, and still get on.
