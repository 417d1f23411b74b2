//! Several threads at one pool, each with a stream of its own, while others poll.

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fake::{Fake, soon};
use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{
    Copier, CopyBatch, Copying, CudaMemory, DeviceSlab, Loan, Settling, Stream, Timeline,
    Timelines, TimelinesConfig,
};

const G: u64 = 256;
const GRANULES: u64 = 32;
const THREADS: u32 = 3;
const ROUNDS: u32 = 400;
const KEYS: u32 = 8;

#[test]
fn threads_that_lend_reserve_and_poll_meet_no_byte_that_is_in_use() {
    let fake = Fake::seeded(99);
    let device = fake.device();
    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, GRANULES * G).unwrap());
    let base = slab.address();
    let pool = Pool::<u32, ()>::new(PoolConfig::new(PoolId::new(), slab.len())).unwrap();
    let pool = SharedPool::new(pool, ());
    let timelines = Timelines::new(&pool, slab.clone(), TimelinesConfig::default()).unwrap();
    let (done, handed_out, hits) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                timelines.poll().expect("nothing fails");
                std::thread::yield_now();
            }
        });
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (fake, pool, timelines, device) = (&fake, &pool, &timelines, &device);
                let (handed_out, hits, slab) = (&handed_out, &hits, &slab);
                scope.spawn(move || {
                    let timeline = timelines.attach(&Stream::new(device).unwrap()).unwrap();
                    let copier = Copier::side(device).unwrap();
                    for round in 0..ROUNDS {
                        let key = (round * 7 + number * 3) % KEYS;
                        if let Some(lease) = pool.acquire(&key) {
                            hits.fetch_add(1, Ordering::Relaxed);
                            let loan = timeline.lend(lease).expect("within the bounds");
                            fake.launch(loan.stream(), loan.address(), loan.len(), None);
                            if round % 3 == 0 {
                                drop(loan);
                            } else {
                                loan.release().expect("nothing fails");
                            }
                            continue;
                        }
                        let len = G * u64::from(1 + key);
                        let bytes = match pool.with(|pool, ()| pool.reserve(len)) {
                            Reserve::Ready(bytes) => bytes,
                            Reserve::Later(claim) => {
                                pool.with(|pool, ()| pool.drop_claim(claim)).unwrap();
                                timelines.poll().expect("nothing fails");
                                continue;
                            }
                            // The others hold what there is, for now.
                            Reserve::Full => {
                                std::thread::yield_now();
                                continue;
                            }
                            Reserve::TooLarge => panic!("{len} bytes fit"),
                        };
                        let address = base + bytes.offset();
                        assert_eq!(fake.touching(address, len), 0, "in use");
                        handed_out.fetch_add(1, Ordering::Relaxed);
                        let bytes = pool.allocation_guard(bytes).unwrap();
                        let loan = timeline.lend(bytes).expect("within the bounds");
                        fake.launch(loan.stream(), loan.address(), len, Some(key as u8));
                        let bytes = loan.settle().unwrap().wait(soon()).unwrap();
                        let found = fake.peek(address, len as usize);
                        assert!(found.iter().all(|byte| *byte == key as u8));
                        let at = bytes.offset();
                        let bytes = bytes.into_allocation();
                        let lease = pool.with(|pool, ()| pool.publish(key, bytes, ())).unwrap();
                        let lease = pool.lease_guard(lease).unwrap();
                        // Its first half to nowhere new, with the lease held by the copy.
                        let batch = CopyBatch::one((slab, at), (slab, at), 0, lease);
                        drop(copier.submit(batch).expect("within the bounds"));
                        copier.poll().expect("nothing fails");
                    }
                })
            })
            .collect();
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        // Also where one has panicked: else nobody would hear of it.
        done.store(true, Ordering::Relaxed);
        poller.join().expect("no panic");
        for end in ends {
            end.expect("no panic");
        }
    });
    assert_eq!(timelines.drain(soon()), Ok(0));
    let stats = pool.with(|pool, ()| pool.stats());
    assert_eq!(stats.free + stats.resident_idle, stats.usable, "{stats}");
    let (handed_out, hits) = (handed_out.into_inner(), hits.into_inner());
    println!("{handed_out} regions handed out, {hits} hits");
    assert!(handed_out > 50 && hits > 50, "{handed_out}, {hits}");
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
