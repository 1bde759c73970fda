// Threads that help with loops. See pool.c.
#pragma once

typedef void (*Item)(const void *args, long item);

// item(args, i) for every i in [0, count), in any order, on the caller and its helpers. Returns when all are done.
void parallel(Item item, const void *args, long count);

// How many threads `parallel` uses at most from now on, the caller included.
void set_threads(int count);

// As set last; what the next `parallel` may use.
int get_threads(void);
