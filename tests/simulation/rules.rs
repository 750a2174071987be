//! The rules one by one, as short stories.
