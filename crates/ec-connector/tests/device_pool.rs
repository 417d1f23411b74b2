//! A consumer whose pool is in GPU memory, on the fake driver: kernels read items, and their bytes wait for them.
#![cfg(feature = "cuda")]

#[path = "../../slab-cuda/tests/fake/mod.rs"]
mod fake;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ec_connector::{
    Consumer, ConsumerConfig, Delivery, Dtype, Item, MmHash, Producer, ProducerConfig, Push,
    PushId, Source, TakePolicy, TensorSpec,
};
use fake::{Fake, pattern, soon};
use mooncake_transport::Engine;
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use slab_cuda::{CudaMemory, Device, DeviceSlab, Stream, TimelinesConfig};
use slab_memory::Memory;

/// One item and a half: two never fit.
const POOL: u64 = 384 << 10;
const ITEM: usize = 256 << 10;

fn engine() -> Arc<dyn Engine> {
    Arc::new(TcpEngine::start(TcpConfig::default()).unwrap())
}

fn consumer(device: &Device) -> (Consumer, slab_cuda::Timelines, Arc<dyn CudaMemory>) {
    let memory: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(device, POOL).unwrap());
    let mut config = ConsumerConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0, 0);
    config.reservations.take = TakePolicy::OnReady { taken_max: 4 };
    let (consumer, timelines) = Consumer::start_on_device(
        engine(),
        Arc::clone(&memory),
        config,
        TimelinesConfig::default(),
    )
    .unwrap();
    (consumer, timelines, memory)
}

fn push(producer: &Producer, consumer: &Consumer, name: &str, source: Source) -> Push {
    producer.push(Item {
        to: consumer.address().clone(),
        mm_hash: MmHash::new(name).unwrap(),
        tensor: TensorSpec::new(Dtype::UINT8, [ITEM as u64]).unwrap(),
        source,
        id: PushId::Fresh,
    })
}

#[test]
fn bytes_of_an_item_that_a_kernel_reads_are_not_reused_before_it_has_ended() {
    let fake = Fake::seeded(4);
    let device = fake.device();
    let stream = Stream::new(&device).unwrap();
    let (consumer, timelines, memory) = consumer(&device);
    let timeline = timelines.attach(&stream).unwrap();
    let producer = Producer::start(engine(), ProducerConfig::default()).unwrap();

    let first = pattern(1, ITEM);
    let report =
        push(&producer, &consumer, "first", Source::Bytes(first.clone())).wait(Some(soon()));
    assert_eq!(report.unwrap().result.unwrap(), Delivery::Written);
    let item = consumer.next_taken(Some(soon())).unwrap();
    let mut found = vec![0; ITEM];
    item.copy_out(0, &mut found).unwrap();
    assert!(found == first, "the bytes are on the device");

    // A kernel that does not get on reads it.
    fake.hold(&stream, true);
    let loan = timeline.lend(item.into_lease()).unwrap();
    fake.launch(&stream, loan.address(), ITEM as u64, None);
    loan.release().unwrap();

    // The next item needs its bytes.
    let second = pattern(2, ITEM);
    let under_way = push(
        &producer,
        &consumer,
        "second",
        Source::Bytes(second.clone()),
    );
    let looks_until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < looks_until {
        timelines.poll().unwrap();
        assert!(under_way.poll().is_none(), "it has to wait for the kernel");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(fake.touching(memory.address(), POOL), 1);

    // The kernel ends, which the consumer does not find out by itself.
    fake.hold(&stream, false);
    fake.advance_all();
    assert_eq!(fake.touching(memory.address(), POOL), 0);
    std::thread::sleep(Duration::from_millis(300));
    assert!(under_way.poll().is_none(), "nobody has polled");

    let deadline = soon();
    let report = loop {
        timelines.poll().unwrap();
        if let Some(report) = under_way.poll() {
            break report;
        }
        assert!(Instant::now() < deadline, "the kernel has ended");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(report.result.unwrap(), Delivery::Written);
    let item = consumer.next_taken(Some(soon())).unwrap();
    item.copy_out(0, &mut found).unwrap();
    assert!(
        found == second,
        "the second item is in the place of the first"
    );
    drop(item);
    drop(timeline);
    consumer.shutdown(soon()).unwrap();
    producer.close();
}

#[test]
fn an_item_goes_from_device_to_device() {
    let fake = Fake::seeded(11);
    let device = fake.driver().device(1).unwrap();
    let (consumer, timelines, _memory) = consumer(&fake.device());
    let producer = Producer::start(engine(), ProducerConfig::default()).unwrap();
    let bytes = pattern(3, ITEM + 13);
    let memory: Arc<dyn Memory> = Arc::new(DeviceSlab::new(&device, bytes.len() as u64).unwrap());
    memory.copy_in(0, &bytes).unwrap();
    let source = Source::Memory {
        memory,
        range: 13..13 + ITEM as u64,
        hold: Arc::new(()),
    };
    let report = push(&producer, &consumer, "an item", source).wait(Some(soon()));
    assert_eq!(report.unwrap().result.unwrap(), Delivery::Written);
    let item = consumer.next_taken(Some(soon())).unwrap();
    let mut found = vec![0; ITEM];
    item.copy_out(0, &mut found).unwrap();
    assert!(found == bytes[13..], "the bytes differ");
    drop(item);
    consumer.shutdown(soon()).unwrap();
    producer.close();
    drop(timelines);
}
