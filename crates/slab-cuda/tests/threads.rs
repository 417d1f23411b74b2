//! Several threads at one pool, each with a stream of its own, while another polls; with and without errors.

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fake::{Fake, soon};
use slab_core::{Pool, PoolConfig, PoolId, PoolStats, Reserve, SharedPool};
use slab_cuda::{
    Copier, CopyBatch, Copying, CudaError, CudaMemory, Device, DeviceSlab, Loan, Settling, Stream,
    Timeline, Timelines, TimelinesConfig,
};

const G: u64 = 256;
const GRANULES: u64 = 32;
const THREADS: u32 = 3;
const ROUNDS: u32 = 400;
const KEYS: u32 = 8;

struct Setup {
    device: Device,
    slab: Arc<dyn CudaMemory>,
    pool: SharedPool<u32, ()>,
    timelines: Timelines,
    handed_out: AtomicU64,
    hits: AtomicU64,
    errors: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Setup {
    fn new(fake: &Fake) -> Self {
        let device = fake.device();
        let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, GRANULES * G).unwrap());
        let pool = Pool::<u32, ()>::new(PoolConfig::new(PoolId::new(), slab.len())).unwrap();
        let pool = SharedPool::new(pool, ());
        let config = TimelinesConfig::default();
        Self {
            timelines: Timelines::new(&pool, slab.clone(), config).unwrap(),
            device,
            slab,
            pool,
            handed_out: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    fn stats(&self) -> PoolStats {
        self.pool.with(|pool, ()| pool.stats())
    }

    fn attach(&self) -> Result<Timeline, CudaError> {
        let stream = Stream::new(&self.device)?;
        self.timelines.attach(&stream)
    }

    /// Reads what is resident under the key with a kernel, or has a kernel write it and publishes it.
    fn round(
        &self,
        fake: &Fake,
        timeline: &Timeline,
        copier: &Copier,
        key: u32,
        round: u32,
    ) -> Result<(), CudaError> {
        if let Some(lease) = self.pool.acquire(&key) {
            count(&self.hits);
            let loan = timeline.lend(lease).map_err(|refused| refused.cause)?;
            fake.try_launch(loan.stream(), loan.address(), loan.len(), None);
            if round.is_multiple_of(3) {
                drop(loan);
                return Ok(());
            }
            return loan.release();
        }
        let len = G * u64::from(1 + key);
        let bytes = match self.pool.with(|pool, ()| pool.reserve(len)) {
            Reserve::Ready(bytes) => bytes,
            Reserve::Later(claim) => {
                self.pool.with(|pool, ()| pool.drop_claim(claim)).unwrap();
                return self.timelines.poll().map(|_| ());
            }
            // The others hold what there is, for now.
            Reserve::Full => {
                std::thread::yield_now();
                return Ok(());
            }
            Reserve::TooLarge => panic!("{len} bytes fit"),
        };
        let address = self.slab.address() + bytes.offset();
        assert_eq!(fake.touching(address, len), 0, "in use");
        count(&self.handed_out);
        let bytes = self.pool.allocation_guard(bytes).unwrap();
        let loan = timeline.lend(bytes).map_err(|refused| refused.cause)?;
        fake.try_launch(loan.stream(), loan.address(), len, Some(key as u8));
        let settled = loan.settle()?.wait(soon());
        let bytes = settled.map_err(|refused| refused.cause)?;
        let found = fake.peek(address, len as usize);
        assert!(found.iter().all(|byte| *byte == key as u8));
        let bytes = bytes.into_allocation();
        let published = self.pool.with(|pool, ()| pool.publish(key, bytes, ()));
        let lease = self.pool.lease_guard(published.unwrap()).unwrap();
        // The lease's own place: where another thread was first with the key, our bytes are free already.
        let at = lease.offset();
        // All its bytes are equal, so that copying one half to the other changes nothing. The copy holds the lease.
        let half = len / 2;
        let batch = CopyBatch::one((&self.slab, at), (&self.slab, at + half), half, lease);
        let submitted = copier.submit(batch);
        drop(submitted.map_err(|refused| refused.cause)?);
        copier.poll().map(|_| ())
    }

    /// What a thread does: errors end its stream, and it goes on with another while there is one.
    fn work(&self, fake: &Fake, number: u32) {
        let copier = Copier::side(&self.device).unwrap();
        let mut timeline = self.attach().unwrap();
        for round in 0..ROUNDS {
            let key = (round * 7 + number * 3) % KEYS;
            if let Err(error) = self.round(fake, &timeline, &copier, key, round) {
                count(&self.errors);
                if matches!(error, CudaError::StreamFailed { .. })
                    && let Ok(next) = self.attach()
                {
                    timeline = next;
                }
            }
        }
    }

    fn run(&self, fake: &Fake) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let poller = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if self.timelines.poll().is_err() {
                        count(&self.errors);
                    }
                    std::thread::yield_now();
                }
            });
            let work = |number| scope.spawn(move || self.work(fake, number));
            let workers: Vec<_> = (0..THREADS).map(work).collect();
            let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            // Also where one has panicked: else nobody would hear of it.
            done.store(true, Ordering::Relaxed);
            poller.join().expect("no panic");
            for end in ends {
                end.expect("no panic");
            }
        });
        let [handed_out, hits, errors] =
            [&self.handed_out, &self.hits, &self.errors].map(|c| c.load(Ordering::Relaxed));
        println!("counted: {handed_out} regions handed out, {hits} hits, {errors} errors");
        assert!(handed_out > 20 && hits > 20, "{handed_out}, {hits}");
    }
}

#[test]
fn threads_that_lend_reserve_and_poll_meet_no_byte_that_is_in_use() {
    let fake = Fake::seeded(99);
    let setup = Setup::new(&fake);
    setup.run(&fake);
    assert_eq!(setup.errors.load(Ordering::Relaxed), 0);
    assert_eq!(setup.timelines.drain(soon()), Ok(0));
    let stats = setup.stats();
    assert_eq!(stats.free + stats.resident_idle, stats.usable, "{stats}");
}

#[test]
fn threads_whose_streams_fail_meet_no_byte_that_is_in_use() {
    let mut fake = Fake::seeded(98);
    fake.expect_lost();
    let setup = Setup::new(&fake);
    for nth in [100, 300, 700] {
        fake.inject_many(c"cuEventRecord", nth, 2, 719);
        fake.inject(c"cuEventQuery", nth * 3, 700);
    }
    setup.run(&fake);
    assert!(setup.errors.load(Ordering::Relaxed) > 0);
    assert!(fake.injected() > 0);
    assert_eq!(fake.misuse(), [""; 0]);
}

#[test]
fn handles_go_from_thread_to_thread() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Timelines>();
    is_shared::<Timeline>();
    is_shared::<Stream>();
    is_shared::<Copier>();
    is_shared::<DeviceSlab>();
    is_send::<Copying>();
    is_send::<Loan<slab_core::LeaseGuard>>();
    is_send::<Settling<slab_core::AllocationGuard>>();
}
