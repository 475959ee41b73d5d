"""`quern lab log`: pages and figures from the records of finished studies, one module for each kind of study."""
