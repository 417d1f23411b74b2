//! What has to hold on a device. Each check says by itself what it found.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ec_connector::{
    Consumer, ConsumerConfig, Delivery, Dtype, Item, MmHash, Producer, ProducerConfig, PushId,
    Source, TakePolicy, TensorSpec,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Task};
use slab_core::{Blocks, CopyList, CopySpan};
use slab_cuda::{
    Copier, CopyBatch, Copying, CudaMemory, Device, DeviceSlab, PinnedSlab, RegisteredHost, Stream,
};
use slab_memory::{HostSlab, Memory};

use crate::Effort;
use crate::bytes::{Random, expect, expect_bytes, pattern};
use crate::pool::{Items, soon, submit};

/// A check, by the sentence that it makes sure of.
pub(crate) type Check = (&'static str, fn(&Device, Effort) -> Result<()>);

/// Why a check came to nothing, although nothing was wrong.
#[derive(Debug)]
pub(crate) struct NotShown(&'static str);

impl fmt::Display for NotShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for NotShown {}

pub(crate) const ALL: &[Check] = &[
    (
        "bytes pass into and out of device memory at any offset",
        in_and_out,
    ),
    (
        "pinned and registered host memory are reached by the device",
        host_memory,
    ),
    (
        "lists of scattered copies save and load a tensor",
        lists_of_copies,
    ),
    (
        "bytes that a stream reads are handed out only behind it",
        bytes_wait,
    ),
    (
        "every copy reads what was lent to it, in any order of steps",
        any_order,
    ),
    (
        "an engine sends from and receives into device memory",
        engine_transfers,
    ),
    (
        "pushes go from device to device and are cached there",
        pushes,
    ),
];

pub(crate) fn device_slab(device: &Device, len: u64) -> Result<Arc<dyn CudaMemory>> {
    Ok(Arc::new(DeviceSlab::new(device, len)?))
}

fn in_and_out(device: &Device, effort: Effort) -> Result<()> {
    let len = effort.largest + 7;
    let slab = DeviceSlab::new(device, len)?;
    slab.copy_in(0, &pattern(1, len))?;
    for (offset, count) in [
        (0, 1),
        (1, 4_095),
        (4_097, 262_144),
        (3, 1_048_577),
        (len - 1, 1),
    ] {
        slab.copy_in(offset, &pattern(offset + 2, count))?;
        expect(&slab, offset, offset + 2, count)?;
        // What lies beside it is as it was.
        let mut all = vec![0; len as usize];
        slab.copy_out(0, &mut all)?;
        let mut expected = pattern(1, len);
        expected[offset as usize..][..count as usize].copy_from_slice(&pattern(offset + 2, count));
        expect_bytes(&all, &expected).with_context(|| format!("{count} bytes at {offset}"))?;
        slab.copy_in(
            offset,
            &pattern(1, len)[offset as usize..][..count as usize],
        )?;
    }
    Ok(())
}

/// Copies all of one memory to another, which is as long, and waits.
pub(crate) fn copy(
    copier: &Copier,
    from: &Arc<dyn CudaMemory>,
    to: &Arc<dyn CudaMemory>,
    len: u64,
) -> Result<()> {
    let mut copying = submit(copier, CopyBatch::one((from, 0), (to, 0), len, ()))?;
    Ok(copying.wait(soon())?)
}

fn host_memory(device: &Device, effort: Effort) -> Result<()> {
    let len = effort.largest;
    let there = device_slab(device, len)?;
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(len)?);
    let registered = RegisteredHost::new(device, host).map_err(|refused| refused.cause)?;
    let memories: [Arc<dyn CudaMemory>; 2] = [
        Arc::new(PinnedSlab::new(device, len)?),
        Arc::new(registered),
    ];
    let copier = Copier::side(device)?;
    for (seed, memory) in memories.iter().enumerate() {
        let seed = seed as u64 + 10;
        memory.copy_in(0, &pattern(seed, len))?;
        copy(&copier, memory, &there, len)?;
        expect(&*there, 0, seed, len)?;
        there.copy_in(0, &pattern(seed + 50, len))?;
        copy(&copier, &there, memory, len)?;
        expect(&**memory, 0, seed + 50, len)?;
    }
    Ok(())
}

fn lists_of_copies(device: &Device, _: Effort) -> Result<()> {
    const BLOCK: u64 = 4096;
    const BLOCKS: u64 = 512;
    let tensor = device_slab(device, BLOCKS * BLOCK)?;
    let blocks: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(device, BLOCKS * BLOCK)?);
    let block = NonZeroU64::new(BLOCK).context("a block has bytes")?;
    let region = Blocks::new(blocks.address(), block, BLOCKS)?;
    // Every block once, in an order that has runs and jumps.
    let ids: Vec<u64> = (0..BLOCKS).map(|id| (id * 197 + id / 8) % BLOCKS).collect();
    let mut seen = ids.clone();
    seen.sort_unstable();
    seen.dedup();
    let ids = if seen.len() == ids.len() {
        ids
    } else {
        (0..BLOCKS).rev().collect()
    };
    let bytes = BLOCKS * BLOCK - 100;
    tensor.copy_in(0, &pattern(20, bytes))?;
    let memories = vec![Arc::clone(&tensor), Arc::clone(&blocks)];
    let copier = Copier::side(device)?;
    let mut list = CopyList::new(BLOCKS as usize);
    let places = list.store(0, region.save(&ids, tensor.address(), bytes)?)?;
    let mut copying = submit(
        &copier,
        CopyBatch::new(list, 0..places, memories.clone(), ()),
    )?;
    copying.wait(soon())?;
    for (at, id) in ids.iter().enumerate() {
        let start = at * BLOCK as usize;
        let end = (start + BLOCK as usize).min(bytes as usize);
        let mut found = vec![0; end - start];
        blocks.copy_out(id * BLOCK, &mut found)?;
        expect_bytes(&found, &pattern(20, bytes)[start..end])
            .with_context(|| format!("block {id}"))?;
    }
    tensor.copy_in(0, &vec![0; bytes as usize])?;
    let mut list = CopyList::new(BLOCKS as usize);
    let places = list.store(0, region.load(&ids, tensor.address())?)?;
    let mut copying = submit(&copier, CopyBatch::new(list, 0..places, memories, ()))?;
    copying.wait(soon())?;
    expect(&*tensor, 0, 20, bytes)
}

/// Reads one memory into another in as many pieces as are stored: submitted with a call or a few, they keep a device busy
/// for longer, however fast it is.
fn read_in_pieces(
    copier: &Copier,
    from: &Arc<dyn CudaMemory>,
    to: &Arc<dyn CudaMemory>,
    count: u64,
    len: u64,
) -> Result<Copying> {
    let mut list = CopyList::new(count as usize);
    // The last one first: as neighbours they would be one copy.
    let spans = (0..count).rev().map(|at| CopySpan {
        source: from.address() + at * len,
        destination: to.address() + at * len,
        len,
    });
    let places = list.store(0, spans)?;
    let memories = vec![Arc::clone(from), Arc::clone(to)];
    submit(copier, CopyBatch::new(list, 0..places, memories, ()))
}

/// Fills a pool of one item, lends that to a stream with much to do, and gives its bytes to the next one.
fn bytes_wait(device: &Device, effort: Effort) -> Result<()> {
    const READS: usize = 4;
    const PIECES: u64 = 64;
    const ROUNDS: u64 = 8;
    // A driver that takes pieces one by one takes about as long for each as the device does. A whole read of this size
    // takes any device longer than what follows takes the host.
    const LEN_MIN: u64 = 16 << 20;
    let piece = (effort.largest / 2).max(LEN_MIN) / PIECES;
    let len = PIECES * piece;
    let memory = device_slab(device, len)?;
    let scratch = device_slab(device, len)?;
    let mut items = Items::over(&memory)?;
    let stream = Stream::new(device)?;
    let timeline = items.timelines.attach(&stream)?;
    let copier = Copier::new(&stream);
    for round in 0..ROUNDS {
        let allocation = items.reserve(len)?;
        memory.copy_in(0, &pattern(round, len))?;
        let loan = timeline
            .lend(items.publish(round, allocation)?)
            .map_err(|refused| refused.cause)?;
        // All but the last read it for nothing but the time that it takes.
        let mut last: Option<Copying> = None;
        for _ in 0..READS {
            // Nobody waits for it: what follows on the stream ends later.
            drop(read_in_pieces(&copier, &memory, &scratch, PIECES, piece)?);
        }
        for _ in 0..READS {
            let batch = CopyBatch::one((&memory, 0), (&scratch, 0), len, ());
            last = Some(submit(&copier, batch)?);
        }
        loan.release()?;
        // Overwritten as soon as the pool allows it, which the last read must not see.
        let next = items.reserve(len)?;
        memory.copy_in(0, &vec![0xEE; len as usize])?;
        items.free(next)?;
        last.context("something was read")?.wait(soon())?;
        expect(&*scratch, 0, round, len).with_context(|| format!("round {round}"))?;
    }
    // Otherwise a pool that asks nobody would have passed as well.
    ensure!(
        items.waited > 0,
        NotShown(
            "the device had read everything whenever it was asked, so that no reserve had to wait"
        )
    );
    Ok(())
}

/// A read of an item that was started, and what it has to find.
struct Read {
    copying: Copying,
    slot: u64,
    seed: u64,
    len: u64,
}

/// Random items through a pool that is too small for them, read on several streams.
fn any_order(device: &Device, effort: Effort) -> Result<()> {
    const POOL: u64 = 4 << 20;
    const ITEM: u64 = 512 << 10;
    const SLOTS: u64 = 8;
    let memory = device_slab(device, POOL)?;
    let scratch = device_slab(device, SLOTS * ITEM)?;
    let mut items = Items::over(&memory)?;
    let mut lanes = Vec::new();
    for _ in 0..4 {
        let stream = Stream::new(device)?;
        lanes.push((items.timelines.attach(&stream)?, Copier::new(&stream)));
    }
    let mut random = Random::new(77);
    let mut under_way: VecDeque<Read> = VecDeque::new();
    let mut free: Vec<u64> = (0..SLOTS).collect();
    let finish = |read: Read, free: &mut Vec<u64>| -> Result<()> {
        let Read {
            mut copying,
            slot,
            seed,
            len,
        } = read;
        copying.wait(soon())?;
        free.push(slot);
        expect(&*scratch, slot * ITEM, seed, len).with_context(|| format!("item {seed}"))
    };
    for seed in 0..effort.rounds {
        items.timelines.poll()?;
        let len = 1 + random.below(ITEM);
        let allocation = items.reserve(len)?;
        memory.copy_in(allocation.offset(), &pattern(seed, len))?;
        let offset = allocation.offset();
        let lease = items.publish(seed, allocation)?;
        let (timeline, copier) = &lanes[random.below(lanes.len() as u64) as usize];
        if free.is_empty() {
            let oldest = under_way.pop_front().context("a slot is in use")?;
            finish(oldest, &mut free)?;
        }
        let slot = free.pop().context("a slot is free")?;
        let loan = timeline.lend(lease).map_err(|refused| refused.cause)?;
        let batch = CopyBatch::one((&memory, offset), (&scratch, slot * ITEM), len, ());
        let copying = submit(copier, batch)?;
        match random.below(3) {
            0 => drop(loan),
            _ => loan.release()?,
        }
        under_way.push_back(Read {
            copying,
            slot,
            seed,
            len,
        });
    }
    for read in under_way {
        finish(read, &mut free)?;
    }
    ensure!(items.timelines.drain(soon())? == 0, "loans are left");
    let stats = items.stats();
    ensure!(
        stats.waiting == 0 && stats.quarantined == 0,
        "bytes are left: {stats:?}"
    );
    Ok(())
}

pub(crate) fn engine() -> Result<Arc<TcpEngine>> {
    Ok(Arc::new(TcpEngine::start(TcpConfig::default())?))
}

/// One transfer between `local` and the start of a remote memory.
pub(crate) fn transfer(
    engine: &dyn Engine,
    op: Op,
    peer: (&str, u64),
    local: &Arc<dyn Memory>,
    len: u64,
) -> Result<()> {
    let task = Task {
        op,
        segment: engine.open_segment(peer.0)?,
        remote: peer.1,
        memory: Arc::clone(local),
        range: 0..len,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).map_err(|refused| refused.cause)?;
    let report = batch
        .wait(Some(soon()))
        .context("the transfer takes for ever")?;
    match report.first_failure() {
        None => Ok(()),
        Some((_, failure)) => bail!("{op:?} of {len} bytes: {failure:?}"),
    }
}

fn engine_transfers(device: &Device, effort: Effort) -> Result<()> {
    let (initiator, target) = (engine()?, engine()?);
    for len in [1, 4_097, (1 << 20) + 1, effort.largest - 5] {
        let remote = device_slab(device, len)?;
        let local: Arc<dyn Memory> = device_slab(device, len)?;
        let registration =
            target.register(Arc::clone(&remote) as Arc<dyn Memory>, Access::RemoteWrite)?;
        let peer = (target.session(), remote.address());
        local.copy_in(0, &pattern(len, len))?;
        transfer(&*initiator, Op::Write, peer, &local, len)?;
        expect(&*remote, 0, len, len)?;
        remote.copy_in(0, &pattern(len + 1, len))?;
        transfer(&*initiator, Op::Read, peer, &local, len)?;
        expect(&*local, 0, len + 1, len)?;
        registration.unregister()?;
    }
    Ok(())
}

/// A consumer whose pool is in a memory, and a producer.
pub(crate) fn pair(memory: Arc<dyn Memory>, taken_max: usize) -> Result<(Consumer, Producer)> {
    let mut config = ConsumerConfig::new(std::net::Ipv4Addr::LOCALHOST.into(), 0, 0);
    config.reservations.take = TakePolicy::OnReady { taken_max };
    let consumer = Consumer::start_in(engine()?, memory, config)?;
    Ok((
        consumer,
        Producer::start(engine()?, ProducerConfig::default())?,
    ))
}

/// Pushes bytes of a memory under a name, to the end.
pub(crate) fn push(
    producer: &Producer,
    consumer: &Consumer,
    name: &str,
    memory: &Arc<dyn Memory>,
    len: u64,
) -> Result<Delivery> {
    let push = producer.push(Item {
        to: consumer.address().clone(),
        mm_hash: MmHash::new(name)?,
        tensor: TensorSpec::new(Dtype::UINT8, [len])?,
        source: Source::Memory {
            memory: Arc::clone(memory),
            range: 0..len,
            hold: Arc::new(()),
        },
        id: PushId::Fresh,
    });
    let report = push.wait(Some(soon())).context("the push takes for ever")?;
    Ok(report.result?)
}

fn pushes(device: &Device, effort: Effort) -> Result<()> {
    let pool = device_slab(device, 4 * effort.largest)?;
    let (consumer, producer) = pair(pool, 8)?;
    for round in 0..2 {
        for (seed, len) in [1, 1_000, 65_537, (1 << 20) + 3, effort.largest]
            .into_iter()
            .enumerate()
        {
            let memory: Arc<dyn Memory> = device_slab(device, len)?;
            memory.copy_in(0, &pattern(seed as u64 + 300, len))?;
            let delivery = push(&producer, &consumer, &format!("item {seed}"), &memory, len)?;
            let expected = if round == 0 {
                Delivery::Written
            } else {
                Delivery::Cached
            };
            ensure!(
                delivery == expected,
                "item {seed} was {delivery:?} in round {round}"
            );
            let item = consumer
                .next_taken(Some(soon()))
                .context("nothing was taken")?;
            let mut found = vec![0; len as usize];
            item.copy_out(0, &mut found)?;
            expect_bytes(&found, &pattern(seed as u64 + 300, len))?;
        }
    }
    producer.close();
    Ok(consumer.shutdown(soon())?)
}
