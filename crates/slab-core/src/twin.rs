//! Lines that a broken twin leaves out, so that each model can show that it would notice.
//!
//! Twins exist only with `--cfg slab_loom`. Elsewhere [`is_left_out`] is false at compile time, and nothing remains.

/// One realistic mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[cfg_attr(
    not(slab_loom),
    allow(unreachable_pub, reason = "public only to the models")
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
}

#[cfg(slab_loom)]
static LEFT_OUT: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);

/// Leaves a line out from now on, or none.
#[cfg(slab_loom)]
pub fn leave_out(twin: Option<Twin>) {
    let twin = twin.map_or(0, |twin| twin as u8);
    LEFT_OUT.store(twin, core::sync::atomic::Ordering::Relaxed);
}

#[cfg(slab_loom)]
pub(crate) fn is_left_out(twin: Twin) -> bool {
    LEFT_OUT.load(core::sync::atomic::Ordering::Relaxed) == twin as u8
}

#[cfg(not(slab_loom))]
pub(crate) const fn is_left_out(_: Twin) -> bool {
    false
}
