//! Lines that a broken twin leaves out, so that each model and each harness can show that it would notice.
//!
//! Twins exist only with `--cfg slab_loom` (the models of the lock) or `--cfg slab_twin` (property tests and fuzz targets of
//! the state machines). Elsewhere [`is_left_out`] is false at compile time, and nothing remains.

/// One realistic mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(
    not(any(slab_loom, slab_twin)),
    allow(
        dead_code,
        unreachable_pub,
        reason = "public only to the models and harnesses; some lines need `std`"
    )
)]
pub enum Twin {
    /// Leaving the lock wakes nobody.
    NotifyOnLeave = 1,
    /// Leaving the lock wakes one waiter, whichever it is.
    NotifyEveryone,
    /// A waiter sleeps although its own look has just given bytes back.
    LookAgain,
    /// Leaving the lock leaves the mark of who is inside.
    EraseMarkOnLeave,
    /// A waiter that wakes does not mark itself as inside again.
    MarkOnWake,
    /// Tokens of guards dropped inside the lock stay on the side list.
    TakeReturned,
    /// A run that becomes free does not merge with the free run above it.
    MergeAbove,
    /// The fences of what is given back are not recorded.
    RecordMark,
    /// A later fence on the same timeline does not raise the one that is recorded.
    RaiseMark,
    /// What waits for several timelines is free with the first.
    QueueAgain,
    /// A claim does not withhold the runs that it waits for.
    WithholdRun,
    /// Evicting a key does not look whether its resident is leased.
    SpareLeased,
    /// A size that was refused is refused for ever.
    ForgetRefusal,
}

#[cfg(slab_twin)]
impl Twin {
    /// Those outside the lock.
    pub const OF_STATE_MACHINES: [Self; 7] = [
        Self::MergeAbove,
        Self::RecordMark,
        Self::RaiseMark,
        Self::QueueAgain,
        Self::WithholdRun,
        Self::SpareLeased,
        Self::ForgetRefusal,
    ];
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
