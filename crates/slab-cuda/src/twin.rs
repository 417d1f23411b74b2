//! Lines that a broken twin leaves out, so that the property test and the models can show that they would notice.
//!
//! Twins exist only with `--cfg slab_twin` (the property test) or `--cfg slab_loom` (the models of the timelines).
//! Elsewhere
//! [`is_left_out`] is false at compile time, and nothing remains.

/// One realistic mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(
    not(any(slab_loom, slab_twin)),
    allow(unreachable_pub, reason = "public only to the models and the harness")
)]
pub enum Twin {
    /// The event behind lent memory is not recorded.
    RecordEvent = 1,
    /// A bounce that ends does not wait for its copies.
    AwaitCopies = 2,
    /// A timeline is given to another stream although something recorded on it is not passed.
    AwaitDrain = 3,
    /// Everybody who polls is told of a failure.
    TellOnce = 4,
    /// What is being given back does not count as pending.
    CountGiving = 5,
}

#[cfg(any(slab_loom, slab_twin))]
static LEFT_OUT: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);

/// Leaves a line out from now on, or none.
#[cfg(any(slab_loom, slab_twin))]
pub fn leave_out(twin: Option<Twin>) {
    let twin = twin.map_or(0, |twin| twin as u8);
    LEFT_OUT.store(twin, core::sync::atomic::Ordering::Relaxed);
}

#[cfg(any(slab_loom, slab_twin))]
pub(crate) fn is_left_out(twin: Twin) -> bool {
    LEFT_OUT.load(core::sync::atomic::Ordering::Relaxed) == twin as u8
}

#[cfg(not(any(slab_loom, slab_twin)))]
pub(crate) const fn is_left_out(_: Twin) -> bool {
    false
}
