//! What a real driver would leave undefined is noted; what it allows is not.

// Calls the driver's functions, which are C's.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cuda_fake::abi::*;
use cuda_fake::control::*;

type Handle = *mut c_void;

/// A device, two streams and two events, in a world of their own.
struct Setup {
    device: u64,
    pinned: Handle,
    streams: [Handle; 2],
    events: [Handle; 2],
}

const LEN: u64 = 4096;

fn handle(make: impl FnOnce(*mut Handle) -> u32) -> Handle {
    let mut handle = null_mut();
    assert_eq!(make(&mut handle), 0);
    handle
}

/// Runs `misuse` and compares what was noted with a part of the note; none where there is none.
fn check(note: Option<&str>, misuse: impl FnOnce(&Setup)) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    fake_reset();
    fake_schedule(0, 0);
    assert_eq!(cuInit(0), 0);
    // SAFETY: every place takes its answer, here and in the closures of the tests.
    let context = handle(|place| unsafe { cuDevicePrimaryCtxRetain(place, 0) });
    assert_eq!(cuCtxPushCurrent_v2(context), 0);
    let mut device = 0;
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemAlloc_v2(&mut device, LEN as usize) }, 0);
    let setup = Setup {
        device,
        // SAFETY: as above.
        pinned: handle(|place| unsafe { cuMemHostAlloc(place, LEN as usize, 1) }),
        // SAFETY: as above.
        streams: [0, 1].map(|_| handle(|place| unsafe { cuStreamCreate(place, 1) })),
        // SAFETY: as above.
        events: [0, 1].map(|_| handle(|place| unsafe { cuEventCreate(place, 2) })),
    };
    misuse(&setup);
    let mut text = [0; 500];
    // SAFETY: the text has that much room.
    let len = unsafe { fake_misuse(0, text.as_mut_ptr(), 500) };
    let found = String::from_utf8_lossy(&text[..len as usize]);
    match note {
        Some(note) => assert!(found.contains(note), "{found:?} lacks {note:?}"),
        None => assert_eq!(found, ""),
    }
    let mut popped = null_mut();
    // SAFETY: as above.
    unsafe { cuCtxPopCurrent_v2(&mut popped) };
    // What was freed while it was in use is kept for the work that uses it: nothing may crash.
    fake_advance(0, u64::MAX);
}

fn number(handle: Handle) -> u64 {
    handle.addr() as u64
}

#[test]
fn memory_that_queued_work_touches_is_not_to_be_freed() {
    check(Some("cuMemFree_v2: 1 queued pieces of work touch"), |s| {
        assert_eq!(fake_launch(number(s.streams[0]), s.device + 100, 1, 7), 0);
        assert_eq!(cuMemFree_v2(s.device), 0);
    });
    check(Some("cuMemFreeHost: 1 queued pieces of work touch"), |s| {
        let pinned = number(s.pinned);
        assert_eq!(cuMemcpyAsync(s.device, pinned, 10, s.streams[0]), 0);
        assert_eq!(cuMemFreeHost(s.pinned), 0);
    });
    check(None, |s| {
        fake_launch(number(s.streams[0]), s.device, LEN, 7);
        fake_advance(0, 1);
        assert_eq!(cuMemFree_v2(s.device), 0);
    });
}

#[test]
fn memory_is_freed_once_and_by_its_own_function() {
    check(Some("cuMemFree_v2: nothing of the kind"), |s| {
        assert_eq!(cuMemFree_v2(s.device), 0);
        assert_ne!(cuMemFree_v2(s.device), 0);
    });
    check(Some("cuMemFree_v2: nothing of the kind"), |s| {
        assert_ne!(cuMemFree_v2(number(s.pinned)), 0);
    });
    check(Some("cuMemHostUnregister: nothing of the kind"), |s| {
        assert_ne!(cuMemHostUnregister(s.pinned), 0);
    });
}

#[test]
fn work_stays_inside_of_what_the_driver_knows() {
    for (target, len) in [(0, LEN + 1), (LEN, 1), (LEN - 1, 2)] {
        check(Some("is not inside of an allocation"), |s| {
            let target = s.device + target;
            let code = cuMemcpyAsync(target, number(s.pinned), len as usize, s.streams[0]);
            assert_eq!(code, 1);
        });
        check(Some("a kernel was launched over"), |s| {
            assert_eq!(
                fake_launch(number(s.streams[0]), s.device + target, len, -1),
                1
            );
        });
    }
    check(Some("is not inside of an allocation"), |s| {
        let pageable = [0u8; 10];
        let source = pageable.as_ptr().addr() as u64;
        assert_eq!(cuMemcpyAsync(s.device, source, 10, s.streams[0]), 1);
    });
    check(None, |s| {
        let pinned = number(s.pinned);
        assert_eq!(
            cuMemcpyAsync(s.device, pinned, LEN as usize, s.streams[0]),
            0
        );
    });
}

#[test]
fn an_event_is_recorded_again_only_once_it_was_passed() {
    check(Some("is pending"), |s| {
        cuEventRecord(s.events[0], s.streams[0]);
        cuEventRecord(s.events[0], s.streams[1]);
    });
    check(None, |s| {
        cuEventRecord(s.events[0], s.streams[0]);
        assert_eq!(cuEventQuery(s.events[0]), 600);
        fake_advance(number(s.streams[0]), 1);
        assert_eq!(cuEventQuery(s.events[0]), 0);
        cuEventRecord(s.events[0], s.streams[1]);
    });
}

#[test]
fn handles_are_not_used_once_destroyed() {
    check(Some("no stream"), |s| {
        assert_eq!(cuStreamDestroy_v2(s.streams[0]), 0);
        assert_eq!(fake_launch(number(s.streams[0]), s.device, 1, -1), 400);
    });
    check(Some("cuEventQuery: no event"), |s| {
        cuEventRecord(s.events[0], s.streams[0]);
        assert_eq!(cuEventDestroy_v2(s.events[0]), 0);
        assert_eq!(cuEventQuery(s.events[0]), 400);
    });
    check(Some("cuMemAlloc_v2: no current context"), |s| {
        let mut place = null_mut();
        // SAFETY: the places take the answers.
        unsafe { cuCtxPopCurrent_v2(&mut place) };
        let mut address = s.device;
        // SAFETY: as above.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut address, 1) }, 201);
    });
}

#[test]
fn streams_run_apart_and_wait_for_events_even_if_those_are_destroyed() {
    check(None, |s| {
        let [first, second] = s.streams.map(number);
        fake_launch(first, s.device, 1, 1);
        cuEventRecord(s.events[0], s.streams[0]);
        assert_eq!(cuStreamWaitEvent(s.streams[1], s.events[0], 0), 0);
        cuEventDestroy_v2(s.events[0]);
        fake_launch(second, s.device, 1, 2);
        assert_eq!(fake_advance(second, 9), 0);
        assert_eq!(fake_touching(s.device, 1), 2);
        assert_eq!(fake_advance(first, 9), 2);
        assert_eq!(fake_advance(second, 9), 2);
        let mut byte = 0;
        // SAFETY: there is room for one byte.
        assert_eq!(unsafe { fake_peek(s.device, 1, &mut byte) }, 0);
        assert_eq!(byte, 2);
    });
}

#[test]
fn calls_fail_when_they_are_told_to_and_as_often() {
    check(None, |s| {
        // SAFETY: the text ends with NUL.
        unsafe { fake_inject(c"cuEventQuery".as_ptr(), 2, 2, 700) };
        let codes = [0; 4].map(|_| cuEventQuery(s.events[1]));
        assert_eq!(codes, [0, 700, 700, 0]);
        assert_eq!(fake_injected(), 2);
    });
}

#[test]
fn flags_that_nobody_has_a_reason_for_are_noted() {
    let mut place = null_mut();
    // SAFETY: the place takes the answers, here and below.
    check(Some("cuStreamCreate: flags 0, not 1"), |_| unsafe {
        cuStreamCreate(&mut place, 0);
    });
    // SAFETY: as above.
    check(Some("cuEventCreate: flags 0, not 2"), |_| unsafe {
        cuEventCreate(&mut place, 0);
    });
    // SAFETY: as above.
    check(Some("cuMemHostAlloc: flags 0, not 1"), |_| unsafe {
        cuMemHostAlloc(&mut place, 16, 0);
    });
    let mut bytes = [0u8; 16];
    let host: Handle = bytes.as_mut_ptr().cast();
    check(Some("cuMemHostRegister_v2: flags 1, not 3"), |_| {
        cuMemHostRegister_v2(host, 16, 1);
    });
}

#[test]
fn a_copy_within_host_memory_is_one_that_the_caller_waits_for() {
    check(Some("from host memory to host memory"), |s| {
        let pinned = number(s.pinned);
        cuMemcpyAsync(pinned, pinned + 100, 10, s.streams[0]);
    });
}

#[test]
fn a_context_does_not_end_while_work_is_under_way_in_it() {
    check(Some("ends with 1 pieces of work in it"), |s| {
        fake_launch(number(s.streams[0]), s.device, 1, 7);
        assert_eq!(cuDevicePrimaryCtxRelease_v2(0), 0);
    });
}

#[test]
fn kernels_find_registered_memory_at_an_address_of_its_own() {
    let mut bytes = [0u8; 64];
    let host: Handle = bytes.as_mut_ptr().cast();
    check(Some("a kernel was launched over"), |s| {
        assert_eq!(cuMemHostRegister_v2(host, 64, 3), 0);
        let mut address = 0;
        // SAFETY: the place takes the answer.
        let code = unsafe { cuMemHostGetDevicePointer_v2(&mut address, host, 0) };
        assert_eq!(code, 0);
        assert_eq!(fake_launch(number(s.streams[0]), address + 10, 2, 9), 0);
        assert_eq!(fake_touching(number(host) + 10, 1), 1);
        fake_advance(0, 1);
        // The host's own address is no kernel's.
        assert_eq!(fake_launch(number(s.streams[0]), number(host), 1, 9), 1);
        assert_eq!(cuMemHostUnregister(host), 0);
    });
    assert_eq!(&bytes[9..13], [0, 9, 9, 0]);
}

#[test]
fn calls_that_a_capture_is_in_the_way_of_are_refused_and_spoil_it() {
    const RELAXED: u32 = 2;
    // Mode of the capture, whether it is this thread's, mode of this thread, and whether the call is refused.
    let cases = [
        (0, true, 0, true),
        (0, true, RELAXED, false),
        (1, true, 1, true),
        (RELAXED, true, 0, false),
        (0, false, 0, true),
        (0, false, 1, false),
        (1, false, 0, false),
    ];
    for (mode, is_own, own_mode, is_refused) in cases {
        check(None, |s| {
            let stream = number(s.streams[0]);
            if is_own {
                fake_begin_capture(stream, mode);
            } else {
                let begin = std::thread::spawn(move || fake_begin_capture(stream, mode));
                begin.join().unwrap();
            }
            let mut exchanged = own_mode;
            // SAFETY: the place has the mode, and takes the answer.
            unsafe { cuThreadExchangeStreamCaptureMode(&mut exchanged) };
            let expected = if is_refused { 900 } else { 0 };
            let case = (mode, is_own, own_mode);
            assert_eq!(cuEventQuery(s.events[0]), expected, "{case:?}");
            let spoiled = if is_refused { 901 } else { 0 };
            assert_eq!(fake_end_capture(stream), spoiled, "{case:?}");
            // SAFETY: as above.
            unsafe { cuThreadExchangeStreamCaptureMode(&mut exchanged) };
            assert_eq!(exchanged, own_mode);
        });
    }
}

#[test]
fn work_on_a_stream_that_is_captured_does_not_run() {
    check(None, |s| {
        let stream = number(s.streams[0]);
        fake_begin_capture(stream, 2);
        let mut status = 0;
        // SAFETY: the place takes the answer.
        let code = unsafe { cuStreamIsCapturing(s.streams[0], &mut status) };
        assert_eq!((code, status), (0, 1));
        assert_eq!(fake_launch(stream, s.device, 1, 7), 0);
        assert_eq!(cuEventRecord(s.events[0], s.streams[0]), 0);
        assert_eq!((fake_queued(), cuEventQuery(s.events[0])), (0, 907));
        assert_eq!(fake_end_capture(stream), 0);
        cuEventRecord(s.events[0], s.streams[0]);
        assert_eq!(cuEventQuery(s.events[0]), 600);
    });
}

#[test]
fn every_call_fails_on_a_device_that_has_failed_for_good() {
    check(None, |s| {
        fake_launch(number(s.streams[0]), s.device, 1, 7);
        fake_break_device(0, 700);
        assert_eq!(cuEventQuery(s.events[0]), 700);
        assert_eq!(cuMemFree_v2(s.device), 700);
        assert_eq!((fake_advance(0, 9), fake_queued()), (0, 1));
    });
}
