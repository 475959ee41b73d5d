"""`quern lab log`: pages and figures from the records of finished studies, a function for each kind of study."""
