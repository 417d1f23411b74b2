//! From the fuzzer's bytes to calls. Any bytes are some list of calls, and most changes of a byte change one call, so
//! that a list that was found interesting can be varied.

mod heap;

pub use heap::within_reach_of;
use slab_model::{FencePick, FreeOp, PoolOp};

/// Reads calls off a slice of bytes; when they are used up there are no more.
pub struct Tape<'a> {
    bytes: &'a [u8],
}

impl<'a> Tape<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    fn pick(&mut self) -> Option<usize> {
        self.byte().map(usize::from)
    }

    /// A length up to a little more than `capacity`; small ones most often.
    fn len(&mut self, capacity: u64) -> Option<u64> {
        let kind = self.byte()?;
        let value = u64::from(self.byte()?);
        Some(match kind % 8 {
            0..4 => value,
            4 | 5 => value * 16,
            6 => capacity / 256 * value,
            _ if kind > 250 => u64::MAX - value,
            _ => capacity.saturating_sub(127) + value,
        })
    }

    /// The next call to an allocator of `capacity` bytes.
    pub fn free_op(&mut self, capacity: u64) -> Option<FreeOp> {
        Some(match self.byte()? % 5 {
            0..3 => FreeOp::Allocate(self.len(capacity)?),
            _ => FreeOp::Free(self.pick()?),
        })
    }

    /// The next call to a pool of `capacity` bytes and `keys` keys.
    pub fn pool_op(&mut self, capacity: u64, keys: u32) -> Option<PoolOp> {
        Some(match self.byte()? % 32 {
            0..8 => PoolOp::Reserve {
                len: self.len(capacity)?,
            },
            8..14 => PoolOp::Publish {
                held: self.pick()?,
                key: self.key(keys)?,
                meta: u32::from(self.byte()? > 200),
            },
            14 | 15 => PoolOp::Acquire {
                key: self.key(keys)?,
            },
            16..21 => PoolOp::Release {
                lease: self.pick()?,
                fences: self.fences()?,
            },
            21 | 22 => PoolOp::Free {
                held: self.pick()?,
                fences: self.fences()?,
            },
            23 => PoolOp::Evict {
                key: self.key(keys)?,
            },
            24 | 25 => PoolOp::Reach {
                timeline: self.pick()?,
                by: u64::from(self.byte()? % 4),
            },
            26 | 27 => PoolOp::Poll {
                claim: self.pick()?,
            },
            28 => PoolOp::DropClaim {
                claim: self.pick()?,
            },
            29 => PoolOp::AddTimeline,
            30 => PoolOp::Drain,
            _ => match self.byte()? {
                0..8 => PoolOp::Quarantine { held: self.pick()? },
                8..16 => PoolOp::Fail {
                    timeline: self.pick()?,
                },
                _ => PoolOp::AddTimeline,
            },
        })
    }

    fn key(&mut self, keys: u32) -> Option<u32> {
        Some(u32::from(self.byte()?) % keys)
    }

    fn fences(&mut self) -> Option<Vec<FencePick>> {
        let count = self.byte()? % 4;
        (0..count)
            .map(|_| {
                Some(FencePick {
                    timeline: self.pick()?,
                    ahead: u64::from(self.byte()? % 4),
                })
            })
            .collect()
    }
}

/// Leaves the line out that `SLAB_TWIN` names, once a process; builds without `--cfg slab_twin` have no twins.
pub fn choose_twin() {
    #[cfg(slab_twin)]
    {
        use slab_core::twin::{Twin, leave_out};
        static CHOOSE: std::sync::Once = std::sync::Once::new();
        CHOOSE.call_once(|| {
            let name = std::env::var("SLAB_TWIN").expect("SLAB_TWIN names a twin");
            let twin = Twin::OF_STATE_MACHINES
                .into_iter()
                .find(|twin| format!("{twin:?}") == name);
            leave_out(Some(twin.expect("a twin of the state machines")));
        });
    }
}
