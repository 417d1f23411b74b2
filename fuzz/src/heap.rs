//! How much was asked of the heap at once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest request since it was last reset. A target runs on one thread.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watched;

#[global_allocator]
static HEAP: Watched = Watched;

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        LARGEST.fetch_max(len, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, len) }
    }
}

/// Does `work` and asserts that it never asked for much more memory at once than `input` bytes of it
/// could fill, whatever sizes those bytes announce.
pub fn within_reach_of<T>(input: usize, work: impl FnOnce() -> T) -> T {
    LARGEST.store(0, Ordering::Relaxed);
    let result = work();
    let largest = LARGEST.load(Ordering::Relaxed);
    // A list doubles as it grows, and a value, or the answer to it, is larger than its text: to `0,` in a batch a
    // refusal of about 100 bytes.
    let reach = 256 * input + 4_096;
    assert!(
        largest <= reach,
        "{input} bytes made it ask for {largest} at once"
    );
    result
}
