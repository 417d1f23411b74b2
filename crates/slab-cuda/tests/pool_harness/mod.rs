//! A pool over device memory, driven by any list of steps. After each step the invariants are asserted; above all, that
//! bytes which are handed out are touched by nothing that the device has not done yet, for which the fake is asked.

mod bounces;
mod copies;

use std::sync::Arc;

use bounces::Passage;
use copies::Copies;
use proptest::prelude::*;
use slab_core::{
    AllocationGuard, Claim, LeaseGuard, Pool, PoolConfig, PoolId, Region, Reserve, RunState,
    SharedPool,
};
use slab_cuda::{
    Copier, CudaError, CudaMemory, Device, DeviceSlab, Loan, PinnedSlab, Settling, Stream,
    Timeline, Timelines, TimelinesConfig,
};
use slab_memory::BounceDirection;

use super::fake::{CaptureMode, Fake};

const G: u64 = 256;
const GRANULES: u64 = 24;
const STREAMS: usize = 3;
/// Bytes of the pinned memory.
const PINNED: u64 = 16 * G;
const KEYS: u8 = 10;

/// How a loan ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Release,
    Drop,
    DropInside,
    Settle,
}

/// What becomes of the bytes of a reserve.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    Publish(u8),
    /// A kernel of a stream writes them.
    Write(u8, End),
    Keep,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Reserve {
        granules: u8,
        used: Use,
    },
    PollClaim(u8),
    Acquire(u8),
    /// A kernel reads what is leased, once or more often.
    Read {
        lease: u8,
        stream: u8,
        kernels: u8,
        end: End,
    },
    Unlease(u8),
    Free(u8),
    PollSettling(u8),
    /// Copies what is leased, some of it, to bytes that were kept or to pinned memory, holding both.
    Copy {
        lease: u8,
        leases: u8,
        target: u8,
        into_pinned: bool,
    },
    CopyBack {
        pinned: u8,
        kept: u8,
    },
    PollCopies(u8),
    /// An engine receives into bytes that were kept, or sends them.
    BeginBounce {
        kept: u8,
        is_out: bool,
    },
    PassBytes {
        bounce: u8,
        most: u8,
    },
    EndBounce(u8),
    /// Work of any stream runs: those for bounces are nobody's else.
    AdvanceAny(u8),
    /// A stream of its own begins to be captured, or the capture ends, which nothing may have spoiled.
    Capture,
    Evict(u8),
    Advance {
        stream: u8,
        count: u8,
    },
    AdvanceCopies(u8),
    Poll,
    /// Another stream takes the place of one.
    Renew(u8),
    Inject {
        symbol: u8,
        nth: u8,
        code: u16,
    },
    Fail(u8),
    /// The device fails for good.
    Break,
}

/// Calls that can be made to fail.
const SYMBOLS: [&std::ffi::CStr; 14] = [
    c"cuMemcpyBatchAsync_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuCtxPopCurrent_v2",
    c"cuStreamIsCapturing",
    c"cuThreadExchangeStreamCaptureMode",
    c"cuEventQuery",
    c"cuEventRecord",
    c"cuEventCreate",
    c"cuMemcpyAsync",
    c"cuCtxPushCurrent_v2",
    c"cuStreamCreate",
    c"cuEventDestroy_v2",
    c"cuStreamDestroy_v2",
];

pub(crate) fn steps(with_errors: bool) -> impl Strategy<Value = Vec<Step>> {
    let end = || {
        prop_oneof![
            Just(End::Release),
            Just(End::Drop),
            Just(End::DropInside),
            Just(End::Settle)
        ]
    };
    let used = prop_oneof![
        4 => (0..KEYS).prop_map(Use::Publish),
        3 => (any::<u8>(), end()).prop_map(|(stream, end)| Use::Write(stream, end)),
        3 => Just(Use::Keep),
    ];
    let whole = prop_oneof![
        10 => (1..9u8, used).prop_map(|(granules, used)| Step::Reserve { granules, used }),
        3 => any::<u8>().prop_map(Step::PollClaim),
        4 => (0..KEYS).prop_map(Step::Acquire),
        8 => (any::<u8>(), any::<u8>(), 1..4u8, end()).prop_map(|(lease, stream, kernels, end)| {
            Step::Read { lease, stream, kernels, end }
        }),
        3 => any::<u8>().prop_map(Step::Unlease),
        1 => any::<u8>().prop_map(Step::Free),
        2 => any::<u8>().prop_map(Step::PollSettling),
        3 => (any::<u8>(), 1..4u8, any::<u8>(), any::<bool>()).prop_map(
            |(lease, leases, target, into_pinned)| Step::Copy { lease, leases, target, into_pinned }
        ),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(pinned, kept)| Step::CopyBack { pinned, kept }),
        3 => any::<u8>().prop_map(Step::PollCopies),
        4 => (any::<u8>(), any::<bool>()).prop_map(|(kept, is_out)| Step::BeginBounce { kept, is_out }),
        9 => (any::<u8>(), any::<u8>()).prop_map(|(bounce, most)| Step::PassBytes { bounce, most }),
        1 => any::<u8>().prop_map(Step::EndBounce),
        2 => (1..6u8).prop_map(Step::AdvanceAny),
        1 => Just(Step::Capture),
        1 => (0..KEYS).prop_map(Step::Evict),
        6 => (any::<u8>(), 1..5u8).prop_map(|(stream, count)| Step::Advance { stream, count }),
        1 => (1..5u8).prop_map(Step::AdvanceCopies),
        6 => Just(Step::Poll),
        1 => any::<u8>().prop_map(Step::Renew),
    ];
    let codes = || prop_oneof![Just(2u16), Just(700), Just(719), Just(1234)];
    let errors = prop_oneof![
        24 => (any::<u8>(), 1..6u8, codes()).prop_map(|(symbol, nth, code)| {
            Step::Inject { symbol, nth, code }
        }),
        2 => any::<u8>().prop_map(Step::Fail),
        1 => Just(Step::Break),
    ];
    let weight = 2 * u32::from(with_errors);
    let step = prop_oneof![30 => whole, weight => errors];
    prop::collection::vec(step, 1..150)
}

/// What a list of steps has met.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Met {
    /// Calls of the driver that were made to fail.
    pub(crate) injected: u64,
    /// Errors that were told.
    pub(crate) errors: u64,
    /// Lists of copies that have ended and were compared.
    pub(crate) copied: u64,
    /// Bounces all of whose bytes have passed and were compared.
    pub(crate) bounced: u64,
}

impl std::ops::Add for Met {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            injected: self.injected + other.injected,
            errors: self.errors + other.errors,
            copied: self.copied + other.copied,
            bounced: self.bounced + other.bounced,
        }
    }
}

/// Dropped before everything else: what goes after a panic waits for the device.
struct RunOnPanic;

impl Drop for RunOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            super::fake::run_immediately();
        }
    }
}

pub(crate) struct Harness {
    _run_on_panic: RunOnPanic,
    bounces: Vec<Passage>,
    copies: Vec<Copies>,
    timelines: Timelines,
    lanes: Vec<Timeline>,
    copier: Copier,
    pool: SharedPool<u8, ()>,
    device: Device,
    base: u64,
    leases: Vec<(u8, LeaseGuard)>,
    kept: Vec<AllocationGuard>,
    settling: Vec<Settling<AllocationGuard>>,
    settling_leases: Vec<Settling<LeaseGuard>>,
    claims: Vec<(Claim, Use)>,
    pinned_memory: Arc<dyn CudaMemory>,
    pinned_pool: SharedPool<u8, ()>,
    /// Pinned bytes with one content.
    pinned: Vec<(u8, AllocationGuard)>,
    /// Is captured now and then.
    graphs: Stream,
    is_capturing: bool,
    /// A stream or the device was made to fail.
    failed: bool,
    met: Met,
    /// Last, so that everything above has gone when it looks what is left.
    pub(crate) fake: Fake,
}

fn pick(count: usize, pick: u8) -> Option<usize> {
    (count > 0).then(|| usize::from(pick) % count)
}

impl Harness {
    pub(crate) fn new() -> Self {
        let fake = Fake::manual();
        let device = fake.device();
        let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, GRANULES * G).unwrap());
        let base = slab.address();
        let pool = Pool::new(PoolConfig::new(PoolId::new(), slab.len())).unwrap();
        let pool = SharedPool::new(pool, ());
        let mut config = TimelinesConfig::default();
        config.streams_max = 6;
        config.pending_max = 20;
        let timelines = Timelines::new(&pool, slab, config).unwrap();
        let attach = |_| timelines.attach(&Stream::new(&device).unwrap()).unwrap();
        let pinned: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(&device, PINNED).unwrap());
        let pinned_pool = Pool::new(PoolConfig::new(PoolId::new(), PINNED)).unwrap();
        Self {
            _run_on_panic: RunOnPanic,
            bounces: Vec::new(),
            copies: Vec::new(),
            pinned_memory: pinned,
            pinned_pool: SharedPool::new(pinned_pool, ()),
            pinned: Vec::new(),
            graphs: Stream::new(&device).unwrap(),
            is_capturing: false,
            lanes: (0..STREAMS).map(attach).collect(),
            copier: Copier::side(&device).unwrap(),
            timelines,
            pool,
            device,
            base,
            leases: Vec::new(),
            kept: Vec::new(),
            settling: Vec::new(),
            settling_leases: Vec::new(),
            claims: Vec::new(),
            failed: false,
            met: Met::default(),
            fake,
        }
    }

    pub(crate) fn apply(&mut self, step: Step) {
        match step {
            Step::Reserve { granules, used } => self.reserve(u64::from(granules) * G, used),
            Step::PollClaim(at) => self.poll_claim(at),
            Step::Acquire(key) => {
                if let Some(lease) = self.pool.acquire(&key) {
                    self.leases.push((key, lease));
                }
            }
            Step::Read {
                lease,
                stream,
                kernels,
                end,
            } => self.read(lease, stream, kernels, end),
            Step::Unlease(at) => {
                if let Some(at) = pick(self.leases.len(), at) {
                    drop(self.leases.swap_remove(at));
                }
            }
            Step::Free(at) => {
                if let Some(at) = pick(self.kept.len(), at) {
                    drop(self.kept.swap_remove(at));
                }
            }
            Step::PollSettling(at) => self.poll_settling(at),
            Step::Copy {
                lease,
                leases,
                target,
                into_pinned,
            } => self.copy_leased(lease, leases, target, into_pinned),
            Step::CopyBack { pinned, kept } => self.copy_back(pinned, kept),
            Step::PollCopies(at) => self.poll_copies(at),
            Step::BeginBounce { kept, is_out } => {
                let directions = [BounceDirection::In, BounceDirection::Out];
                self.begin_bounce(kept, directions[usize::from(is_out)]);
            }
            Step::PassBytes { bounce, most } => self.pass_bytes(bounce, most),
            Step::EndBounce(at) => self.end_bounce(at),
            Step::AdvanceAny(count) => {
                self.fake.advance_any(u64::from(count));
            }
            Step::Capture => self.capture(),
            Step::Evict(key) => {
                self.pool.with(|pool, ()| pool.evict(&key));
            }
            Step::Advance { stream, count } => {
                let stream = self.lanes[usize::from(stream) % STREAMS].stream();
                self.fake.advance(stream, u64::from(count));
            }
            Step::AdvanceCopies(count) => self.advance_copies(count),
            Step::Poll => {
                let polled = self.timelines.poll().map(|_| ());
                self.note(polled);
            }
            Step::Renew(at) => self.renew(at),
            Step::Inject { symbol, nth, code } => {
                let symbol = SYMBOLS[usize::from(symbol) % SYMBOLS.len()];
                self.fake.inject(symbol, u64::from(nth), u32::from(code));
            }
            Step::Break => {
                self.fake.break_device(&self.device, 700);
                self.failed = true;
            }
            Step::Fail(at) => {
                let stream = match usize::from(at) % (STREAMS + 1) {
                    STREAMS => self.copier.stream(),
                    lane => self.lanes[lane].stream(),
                };
                self.fake.fail_stream(stream, 700);
                self.failed = true;
            }
        }
        self.check();
    }

    fn capture(&mut self) {
        if self.is_capturing {
            assert!(self.fake.end_capture(&self.graphs), "a capture was spoiled");
        } else {
            self.fake.begin_capture(&self.graphs, CaptureMode::Global);
        }
        self.is_capturing = !self.is_capturing;
    }

    /// What holds between any two steps.
    fn check(&self) {
        assert_eq!(self.fake.misuse(), [""; 0]);
        self.pool.with(|pool, ()| {
            let stats = pool.stats();
            let sum = stats.free
                + stats.owned
                + stats.resident_leased
                + stats.resident_idle
                + stats.waiting
                + stats.claimed
                + stats.quarantined;
            assert_eq!(sum, stats.usable, "conserved");
            for run in pool.runs() {
                if run.state == RunState::Free {
                    self.check_quiet(run.region);
                }
            }
        });
        for (key, lease) in &self.leases {
            let bytes = self.bytes(lease.region().offset(), lease.len());
            assert!(bytes.iter().all(|byte| byte == key), "leased stays");
        }
    }

    /// The heart of it: nothing that the device has still to do touches what is free, or was just handed out.
    fn check_quiet(&self, region: Region) {
        let touching = self
            .fake
            .touching(self.base + region.offset(), region.len());
        assert_eq!(touching, 0, "the device has not done with {region:?}");
    }

    fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        self.fake.peek(self.base + offset, len as usize)
    }

    fn reserve(&mut self, len: u64, used: Use) {
        match self.pool.with(|pool, ()| pool.reserve(len)) {
            Reserve::Ready(bytes) => {
                let bytes = self.pool.allocation_guard(bytes).unwrap();
                self.use_bytes(bytes, used);
            }
            Reserve::Later(claim) => self.claims.push((claim, used)),
            Reserve::Full | Reserve::TooLarge => {}
        }
    }

    fn poll_claim(&mut self, at: u8) {
        let Some(at) = pick(self.claims.len(), at) else {
            return;
        };
        let (claim, used) = self.claims.swap_remove(at);
        match self.pool.with(|pool, ()| pool.poll_claim(claim)) {
            Ok(bytes) => {
                let bytes = self.pool.allocation_guard(bytes).unwrap();
                self.use_bytes(bytes, used);
            }
            Err(claim) => self.claims.push((claim, used)),
        }
    }

    fn use_bytes(&mut self, bytes: AllocationGuard, used: Use) {
        self.check_quiet(bytes.region());
        let (address, len) = (self.base + bytes.offset(), bytes.len());
        match used {
            Use::Keep => self.kept.push(bytes),
            Use::Publish(key) => {
                self.fake.poke(address, &vec![key; len as usize]);
                let bytes = bytes.into_allocation();
                let lease = self.pool.with(|pool, ()| pool.publish(key, bytes, ()));
                let lease = self.pool.lease_guard(lease.unwrap()).unwrap();
                self.leases.push((key, lease));
            }
            Use::Write(stream, end) => {
                let lane = self.lanes[usize::from(stream) % STREAMS].clone();
                match lane.lend(bytes) {
                    Ok(loan) => {
                        self.launch(&loan, Some(0xEE));
                        if let Some(settling) = self.end(loan, end) {
                            self.settling.push(settling);
                        }
                    }
                    Err(refused) => {
                        self.kept.push(refused.value);
                        self.note(Err(refused.cause));
                    }
                }
            }
        }
    }

    fn launch<T: slab_cuda::Lendable>(&self, loan: &Loan<T>, value: Option<u8>) {
        self.fake
            .try_launch(loan.stream(), loan.address(), loan.len(), value);
    }

    fn end<T: slab_cuda::Lendable>(&mut self, loan: Loan<T>, end: End) -> Option<Settling<T>> {
        match end {
            End::Release => {
                let released = loan.release();
                self.note(released);
                None
            }
            End::Drop => {
                drop(loan);
                None
            }
            End::DropInside => {
                self.pool.with(|_, ()| drop(loan));
                None
            }
            End::Settle => match loan.settle() {
                Ok(settling) => Some(settling),
                Err(error) => {
                    self.note(Err(error));
                    None
                }
            },
        }
    }

    fn read(&mut self, lease: u8, stream: u8, kernels: u8, end: End) {
        let Some(at) = pick(self.leases.len(), lease) else {
            return;
        };
        let (key, lease) = self.leases.swap_remove(at);
        let lane = self.lanes[usize::from(stream) % STREAMS].clone();
        match lane.lend(lease) {
            Ok(loan) => {
                for _ in 0..kernels {
                    self.launch(&loan, None);
                }
                if let Some(settling) = self.end(loan, end) {
                    self.settling_leases.push(settling);
                }
            }
            Err(refused) => {
                self.leases.push((key, refused.value));
                self.note(Err(refused.cause));
            }
        }
    }

    fn poll_settling(&mut self, at: u8) {
        if let Some(at) = pick(self.settling.len(), at) {
            let settling = self.settling.swap_remove(at);
            match settling.wait(std::time::Instant::now()) {
                Ok(bytes) => {
                    self.check_quiet(bytes.region());
                    self.kept.push(bytes);
                }
                Err(refused) if refused.cause == CudaError::TimedOut => {
                    self.settling.push(refused.value);
                }
                Err(refused) => self.note(Err(refused.cause)),
            }
        }
        if let Some(at) = pick(self.settling_leases.len(), at) {
            let settling = self.settling_leases.swap_remove(at);
            match settling.wait(std::time::Instant::now()) {
                Ok(lease) => drop(lease),
                Err(refused) if refused.cause == CudaError::TimedOut => {
                    self.settling_leases.push(refused.value);
                }
                Err(refused) => self.note(Err(refused.cause)),
            }
        }
    }

    fn renew(&mut self, at: u8) {
        let renewed = Stream::new(&self.device).and_then(|s| self.timelines.attach(&s));
        match renewed {
            Ok(lane) => self.lanes[usize::from(at) % STREAMS] = lane,
            Err(error) => self.note(Err(error)),
        }
    }

    /// Lets everything end and come back.
    pub(crate) fn finish(mut self) -> Met {
        self.fake.clear_injections();
        if self.is_capturing {
            self.capture();
        }
        self.end_bounces();
        self.leases.clear();
        self.kept.clear();
        self.pinned.clear();
        self.settling.clear();
        self.settling_leases.clear();
        for (claim, _) in self.claims.drain(..) {
            self.pool.with(|pool, ()| pool.drop_claim(claim)).unwrap();
        }
        self.fake.advance_all();
        while !self.copies.is_empty() {
            self.poll_copies(0);
        }
        self.leases.clear();
        self.kept.clear();
        self.pinned.clear();
        // Each failure is told once.
        for _ in 0..10 {
            let _ = self.timelines.poll();
            let _ = self.copier.poll();
        }
        self.check();
        let stats = self.pool.with(|pool, ()| pool.stats());
        if !self.has_failed() {
            assert_eq!(self.timelines.poll(), Ok(0));
            let back = stats.free + stats.resident_idle;
            assert_eq!(back, stats.usable, "everything comes back: {stats}");
        }
        let met = Met {
            injected: self.fake.injected(),
            ..self.met
        };
        let Self {
            mut fake,
            device,
            timelines,
            lanes,
            copier,
            pinned_memory,
            graphs,
            ..
        } = self;
        drop((timelines, lanes, copier, pinned_memory, graphs));
        // What is left without having been counted as lost is a leak, whatever has failed.
        if device.lost().count > 0 {
            assert!(
                met.injected > 0 || self.failed,
                "lost, though nothing failed"
            );
            fake.expect_lost();
        }
        met
    }
}
