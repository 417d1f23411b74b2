//! A pool over device memory, driven by any list of steps. After each step the invariants are asserted; above all, that
//! bytes which are handed out are touched by nothing that the device has not done yet, for which the fake is asked.

use std::sync::Arc;

use proptest::prelude::*;
use slab_core::{
    AllocationGuard, Claim, LeaseGuard, Pool, PoolConfig, PoolId, Region, Reserve, RunState,
    SharedPool,
};
use slab_cuda::{
    Copier, CopyBatch, CudaError, CudaMemory, Device, DeviceSlab, Loan, Settling, Stream, Timeline,
    Timelines, TimelinesConfig,
};

use super::fake::Fake;

const G: u64 = 256;
const GRANULES: u64 = 24;
const STREAMS: usize = 3;
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
    /// Copies what is leased to bytes that were kept, holding both.
    Copy {
        lease: u8,
        kept: u8,
    },
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
}

/// Calls that can be made to fail.
const SYMBOLS: [&std::ffi::CStr; 8] = [
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
        1 => Just(Use::Keep),
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
        2 => (any::<u8>(), any::<u8>()).prop_map(|(lease, kept)| Step::Copy { lease, kept }),
        1 => (0..KEYS).prop_map(Step::Evict),
        6 => (any::<u8>(), 1..5u8).prop_map(|(stream, count)| Step::Advance { stream, count }),
        1 => (1..5u8).prop_map(Step::AdvanceCopies),
        6 => Just(Step::Poll),
        1 => any::<u8>().prop_map(Step::Renew),
    ];
    let codes = || prop_oneof![Just(2u16), Just(700), Just(719), Just(1234)];
    let errors = prop_oneof![
        4 => (any::<u8>(), 1..6u8, codes()).prop_map(|(symbol, nth, code)| {
            Step::Inject { symbol, nth, code }
        }),
        1 => any::<u8>().prop_map(Step::Fail),
    ];
    let weight = u32::from(with_errors);
    let step = prop_oneof![30 => whole, weight => errors];
    prop::collection::vec(step, 1..150)
}

pub(crate) struct Harness {
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
    /// Whether something has failed, so that not everything has to come back.
    failed: bool,
    errors: u64,
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
        Self {
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
            errors: 0,
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
            Step::Copy { lease, kept } => self.copy(lease, kept),
            Step::Evict(key) => {
                self.pool.with(|pool, ()| pool.evict(&key));
            }
            Step::Advance { stream, count } => {
                let stream = self.lanes[usize::from(stream) % STREAMS].stream();
                self.fake.advance(stream, u64::from(count));
            }
            Step::AdvanceCopies(count) => {
                self.fake.advance(self.copier.stream(), u64::from(count));
                let polled = self.copier.poll().map(|_| ());
                self.note(polled);
            }
            Step::Poll => {
                let polled = self.timelines.poll().map(|_| ());
                self.note(polled);
            }
            Step::Renew(at) => self.renew(at),
            Step::Inject { symbol, nth, code } => {
                let symbol = SYMBOLS[usize::from(symbol) % SYMBOLS.len()];
                self.fake.inject(symbol, u64::from(nth), u32::from(code));
                self.failed = true;
            }
            Step::Fail(at) => {
                let stream = self.lanes[usize::from(at) % STREAMS].stream();
                self.fake.fail_stream(stream, 700);
                self.failed = true;
            }
        }
        self.check();
    }

    /// Errors are all right where some were made, and nowhere else.
    fn note(&mut self, result: Result<(), CudaError>) {
        if let Err(error) = result {
            self.errors += 1;
            let is_bound = matches!(
                error,
                CudaError::TooManyPending { .. } | CudaError::TooManyStreams { .. }
            );
            assert!(self.failed || is_bound, "nothing was made to fail: {error}");
        }
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

    fn copy(&mut self, lease: u8, kept: u8) {
        let (Some(from), Some(to)) = (pick(self.leases.len(), lease), pick(self.kept.len(), kept))
        else {
            return;
        };
        let (key, lease) = self.leases.swap_remove(from);
        let target = self.kept.swap_remove(to);
        let memory = self.timelines.memory();
        let len = lease.len().min(target.len());
        let (from, to) = (lease.offset(), target.offset());
        let batch = CopyBatch::one((memory, from), (memory, to), len, (lease, target));
        match self.copier.submit(batch) {
            Ok(copying) => drop(copying),
            Err(refused) => {
                let (_, hold) = refused.value.into_parts();
                let hold = hold.downcast::<(LeaseGuard, AllocationGuard)>().unwrap();
                let (lease, target) = *hold;
                self.leases.push((key, lease));
                self.kept.push(target);
                self.note(Err(refused.cause));
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

    /// Lets everything end and come back. Returns how many errors were met.
    pub(crate) fn finish(mut self) -> u64 {
        self.fake.clear_injections();
        self.leases.clear();
        self.kept.clear();
        self.settling.clear();
        self.settling_leases.clear();
        for (claim, _) in self.claims.drain(..) {
            self.pool.with(|pool, ()| pool.drop_claim(claim)).unwrap();
        }
        self.fake.advance_all();
        // Each failure is told once.
        for _ in 0..10 {
            let _ = self.timelines.poll();
            let _ = self.copier.poll();
        }
        self.check();
        let stats = self.pool.with(|pool, ()| pool.stats());
        if !self.failed {
            assert_eq!(self.timelines.poll(), Ok(0));
            let back = stats.free + stats.resident_idle;
            assert_eq!(back, stats.usable, "everything comes back: {stats}");
        }
        if self.failed {
            self.fake.expect_lost();
        }
        self.errors + self.fake.injected()
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // What goes now waits for the device.
            self.fake.run_immediately();
        }
    }
}
