//! A line that a broken twin leaves out, so that the property test can show that it would notice.
//!
//! Twins exist only with `--cfg slab_twin`. Elsewhere [`is_left_out`] is false at compile time, and nothing remains.

/// One realistic mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(
    not(slab_twin),
    allow(unreachable_pub, reason = "public only to the harness")
)]
pub enum Twin {
    /// The event behind lent memory is not recorded.
    RecordEvent = 1,
    /// A bounce that ends does not wait for its copies.
    AwaitCopies = 2,
}

#[cfg(slab_twin)]
static LEFT_OUT: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);

/// Leaves a line out from now on, or none.
#[cfg(slab_twin)]
pub fn leave_out(twin: Option<Twin>) {
    let twin = twin.map_or(0, |twin| twin as u8);
    LEFT_OUT.store(twin, core::sync::atomic::Ordering::Relaxed);
}

#[cfg(slab_twin)]
pub(crate) fn is_left_out(twin: Twin) -> bool {
    LEFT_OUT.load(core::sync::atomic::Ordering::Relaxed) == twin as u8
}

#[cfg(not(slab_twin))]
pub(crate) const fn is_left_out(_: Twin) -> bool {
    false
}
