//! A pool in a `static`, without a heap: frames of a sensor in one region of memory, shared with interrupts.
//!
//! `cargo run -p slab-core --example static_pool`
//!
//! The same file is built for a machine without operating system and without allocator by `cargo xtask nostd`.

#![cfg_attr(target_os = "none", no_std, no_main)]

use core::hash::{BuildHasherDefault, Hasher};

use slab_core::{Inline, Pool, PoolConfig, PoolId, PoolStats, Reserve};
use spin::Mutex;

/// Frames are numbered by the sensor, so no stranger chooses the keys and a plain hash will do.
#[derive(Default)]
struct Multiplied(u64);

impl Hasher for Multiplied {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }
}

/// At most 30 runs; 64 KiB in granules of 256 bytes need 193 size classes.
type Frames = Pool<u32, (), BuildHasherDefault<Multiplied>, Inline<32, 193>>;

/// Wrong numbers here do not compile.
static FRAMES: Mutex<Frames> = Mutex::new(Frames::new_inline(
    PoolConfig::new(PoolId::from_raw(1), 64 << 10),
    BuildHasherDefault::new(),
));

/// What a driver does with each frame. `None` while every byte is in use.
fn keep(number: u32, len: u64) -> Option<()> {
    let mut frames = FRAMES.lock();
    let Reserve::Ready(bytes) = frames.reserve(len) else {
        return None;
    };
    // Here the device would write its frame at `bytes.offset()`.
    let lease = frames.publish(number, bytes, ()).ok()?;
    frames.release(lease, &[]).ok()
}

fn run() -> Option<PoolStats> {
    for number in 0..100 {
        keep(number, 3_000 + 500 * u64::from(number % 5))?;
    }
    let frames = FRAMES.lock();
    frames.is_resident(&99).then(|| frames.stats())
}

#[cfg(not(target_os = "none"))]
fn main() {
    let stats = run().expect("older frames give way");
    println!("{stats}");
    println!(
        "{} frames kept, {} gave way; the pool takes {} bytes",
        stats.residents,
        stats.evictions,
        size_of::<Frames>()
    );
}

#[cfg(target_os = "none")]
#[used]
static ENTRY: fn() -> Option<PoolStats> = run;

#[cfg(target_os = "none")]
#[panic_handler]
fn halt(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
