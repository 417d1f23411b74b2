//! Graphs that the program captures: nothing here spoils a capture, and nothing is lent to a stream whose work does not
//! run.

mod fake;
mod pool_setup;

use std::sync::Arc;

use fake::{CaptureMode, Fake, pattern, soon};
use pool_setup::{G, GRANULES, setup};
use slab_core::RunState;
use slab_cuda::{
    Copier, CopyBatch, CudaError, CudaMemory, DeviceSlab, PinnedSlab, RegisteredHost, Stream,
};
use slab_memory::{HostSlab, Memory};

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

/// Everything that the crate calls the driver for.
fn use_everything(fake: &Fake) {
    drop(fake.driver().device(1).unwrap());
    let setup = setup(fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.publish(1, 2)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), None);
    loan.release().unwrap();
    assert_eq!(setup.timelines.poll(), Ok(0), "the event is passed");
    let settling = timeline.lend(setup.allocate(1)).unwrap().settle().unwrap();
    drop(settling.wait(soon()).unwrap());

    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&setup.device, 4096).unwrap());
    let pinned: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(&setup.device, 4096).unwrap());
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    drop(RegisteredHost::new(&setup.device, host).unwrap());
    let bytes = pattern(3, 4096);
    slab.copy_in(0, &bytes).unwrap();
    let copier = Copier::side(&setup.device).unwrap();
    copier.stream().wait_for(timeline.stream()).unwrap();
    let batch = CopyBatch::one((&slab, 0), (&pinned, 0), 4096, ());
    copier.submit(batch).unwrap().wait(soon()).unwrap();
    let mut found = vec![0; 4096];
    pinned.copy_out(0, &mut found).unwrap();
    assert!(found == bytes);
    assert!(setup.device.memory_use().is_ok());
}

#[test]
fn a_capture_of_whichever_thread_and_mode_is_not_spoiled() {
    for mode in MODES {
        let fake = Fake::immediate();
        let device = fake.device();
        let stream = Stream::new(&device).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| fake.begin_capture(&stream, mode));
        });
        use_everything(&fake);
        assert!(fake.end_capture(&stream), "another thread's, {mode:?}");
        fake.begin_capture(&stream, mode);
        use_everything(&fake);
        assert!(fake.end_capture(&stream), "this thread's, {mode:?}");
    }
}

#[test]
fn a_thread_gets_on_with_captures_as_before() {
    let fake = Fake::immediate();
    let stream = Stream::new(&fake.device()).unwrap();
    use_everything(&fake);
    // Else this thread would be in the relaxed mode now, in which it spoils nothing.
    fake.begin_capture(&stream, CaptureMode::Global);
    assert_eq!(fake.allocate_directly(), 900);
    assert!(!fake.end_capture(&stream));
}

#[test]
fn nothing_is_lent_copied_or_waited_for_on_a_stream_that_captures() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let slab = setup.timelines.memory();
    let other = Stream::new(&setup.device).unwrap();
    fake.begin_capture(timeline.stream(), CaptureMode::Relaxed);
    let refused = timeline.lend(setup.allocate(1)).unwrap_err();
    assert_eq!(refused.cause, CudaError::StreamCapturing);
    drop(refused);
    let batch = CopyBatch::one((slab, 0), (slab, G), G, ());
    let refused = Copier::new(timeline.stream()).submit(batch).unwrap_err();
    assert_eq!(refused.cause, CudaError::StreamCapturing);
    for (waiting, waited_for) in [(&other, timeline.stream()), (timeline.stream(), &other)] {
        let error = waiting.wait_for(waited_for).unwrap_err();
        assert_eq!(error, CudaError::StreamCapturing);
    }
    assert!(fake.end_capture(timeline.stream()));
    // The refusals have left nothing behind.
    let loan = timeline.lend(setup.allocate(1)).unwrap();
    loan.release().unwrap();
    assert_eq!(setup.timelines.poll(), Ok(0));
    assert_eq!(setup.stats().free, GRANULES * G);
}

#[test]
fn a_loan_that_ends_while_its_stream_captures_keeps_its_bytes() {
    let mut fake = Fake::immediate();
    fake.expect_lost();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(3)).unwrap();
    fake.begin_capture(loan.stream(), CaptureMode::Relaxed);
    assert_eq!(loan.release(), Err(CudaError::StreamCapturing));
    assert!(fake.end_capture(timeline.stream()));
    assert_eq!(setup.timelines.poll(), Err(CudaError::StreamCapturing));
    // The capture is over, the stream stays failed.
    let refused = timeline.lend(setup.allocate(1)).unwrap_err();
    let told = "the stream has failed before: cuEventRecord answered CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (900)";
    assert_eq!(refused.to_string(), told);
    drop(refused);
    let stats = setup.stats();
    assert_eq!((stats.free, stats.quarantined), (5 * G, 3 * G), "{stats}");
    let states: Vec<RunState> = setup
        .pool
        .with(|pool, ()| pool.runs().map(|run| run.state).collect());
    assert!(states.contains(&RunState::Quarantined), "{states:?}");
}

#[test]
fn an_event_is_asked_again_after_a_query_that_a_capture_was_in_the_way_of() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let timeline = setup.attach();
    for code in [900, 901, 906] {
        timeline.lend(setup.allocate(1)).unwrap().release().unwrap();
        fake.inject(c"cuEventQuery", 1, code);
        assert_eq!(setup.timelines.poll(), Ok(1), "{code}");
        assert_eq!(setup.timelines.poll(), Ok(0), "{code}");
    }
}
