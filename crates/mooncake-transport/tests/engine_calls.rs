//! What calls of an engine say when they cannot do what they are asked, and what the code of a user
//! may do on the engine's thread.
#![cfg(feature = "tcp")]

mod support;

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Wake, Waker};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::control::{FrameKind, NOTIFY_TAKEN, encode_frame};
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, ControlError, Engine, EngineError, Op, Remote, Task};
use support::{FakePeer, LONG, engine, engine_with, finish, register, run_one, slab, task};

struct PanickingWaker;

impl Wake for PanickingWaker {
    fn wake(self: Arc<Self>) {
        panic!("a waker of the test");
    }
}

struct PanickingHold;

impl Drop for PanickingHold {
    fn drop(&mut self) {
        panic!("a hold of the test");
    }
}

#[test]
fn wakers_and_holds_that_panic_leave_the_engine_serving_and_unregistering() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(4 << 20), slab(4 << 20));
    let registration = register(&target, &remote);
    let own = register(&source, &local);
    let segment = source.open_segment(target.session()).unwrap();
    let write = || task(Op::Write, &segment, remote.address(), &local, 0..4 << 20);
    // On a busy machine 8 MiB may be there before this thread asks for them, and then nobody is woken.
    let mut waited = 0;
    for _ in 0..100 {
        let held = Task {
            hold: Box::new(PanickingHold),
            ..write()
        };
        let mut batch = source.submit(vec![held, write()]).unwrap();
        let waker = Waker::from(Arc::new(PanickingWaker));
        let polled = Pin::new(&mut batch).poll(&mut Context::from_waker(&waker));
        assert!(finish(&batch).is_applied());
        assert_eq!(run_one(&source, write()), Remote::Applied);
        waited += u32::from(polled.is_pending());
        if waited == 3 {
            break;
        }
    }
    assert_eq!(waited, 3, "8 MiB were there at once each time");
    own.unregister().unwrap();
    registration.unregister().unwrap();
}

/// Calls its engine from where it is dropped, and says what came of it.
struct CallsWhenDropped {
    engine: Arc<TcpEngine>,
    said: Sender<Result<(), EngineError>>,
}

impl Drop for CallsWhenDropped {
    fn drop(&mut self) {
        let said = self.engine.probe(self.engine.session());
        // The test may have failed and be gone.
        let _ = self.said.send(said);
    }
}

#[test]
fn an_exchange_on_the_engines_own_thread_is_refused_by_name() {
    let (source, target) = (Arc::new(engine()), engine());
    let (remote, local) = (slab(4096), slab(4096));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let (said, heard) = channel();
    let held = Task {
        hold: Box::new(CallsWhenDropped {
            engine: Arc::clone(&source),
            said,
        }),
        ..task(Op::Write, &segment, remote.address(), &local, 0..4096)
    };
    assert_eq!(run_one(&source, held), Remote::Applied);
    let Err(EngineError::Control { source: error, .. }) = heard.recv_timeout(LONG).unwrap() else {
        panic!("the engine waited for itself")
    };
    assert_eq!(error, ControlError::OnEngineThread);
}

#[test]
fn a_notification_goes_to_the_name_in_the_descriptor_or_nowhere() {
    let engine = engine();
    let peer = FakePeer::new();
    let mut descriptor = peer.descriptor();
    descriptor.name = "host.invalid:5".into();
    let open = |descriptor: &Descriptor| {
        std::thread::scope(|scope| {
            scope.spawn(|| peer.answer_metadata(descriptor));
            engine.open_segment(&peer.name()).unwrap()
        })
    };
    let segment = open(&descriptor);
    let error = engine.notify(&segment, "n", "m").unwrap_err();
    assert!(matches!(error, EngineError::Resolve { .. }), "{error:?}");
    drop(segment);
    // A descriptor without a name leaves only the one that was opened.
    descriptor.name.clear();
    let segment = open(&descriptor);
    let taken = encode_frame(FrameKind::Notify, NOTIFY_TAKEN);
    std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_control(&taken));
        engine.notify(&segment, "n", "m").unwrap();
    });
}

#[test]
fn a_host_that_no_peer_can_dial_is_not_advertised() {
    for host in ["0.0.0.0", "::", "[::]", "0"] {
        let mut config = TcpConfig::default();
        config.bind = IpAddr::from([127, 0, 0, 1]);
        config.advertise = Some(host.into());
        let error = TcpEngine::start(config).unwrap_err();
        let host = host.to_owned();
        assert_eq!(error, EngineError::WildcardAdvertised { host });
    }
}

#[test]
fn the_limit_of_the_descriptor_is_a_setting() {
    let engine = engine_with(|config| config.limits.descriptor_bytes_max = 1 << 10);
    let mut registrations = Vec::new();
    let error = loop {
        match engine.register(slab(4096), Access::RemoteWrite) {
            Ok(registration) => registrations.push(registration),
            Err(error) => break error,
        }
        assert!(registrations.len() < 100, "registered without end");
    };
    assert!(
        matches!(error, EngineError::DescriptorTooLong { max: 1_024, .. }),
        "{error:?}"
    );
    // There is room again once one of them is gone.
    registrations.pop();
    registrations.push(engine.register(slab(4096), Access::RemoteWrite).unwrap());
}

#[test]
fn the_bytes_of_waiting_notifications_are_a_setting() {
    let (source, target) = (
        engine(),
        engine_with(|config| config.limits.notices_bytes_max = 1 << 20),
    );
    let segment = source.open_segment(target.session()).unwrap();
    let message = "m".repeat(400_000);
    for name in ["first", "second", "third"] {
        source.notify(&segment, name, &message).unwrap();
    }
    let taken = target.take_notices().unwrap();
    let names: Vec<&str> = taken.notices.iter().map(|notice| &*notice.name).collect();
    assert_eq!(names, ["second", "third"]);
    assert_eq!(taken.dropped, 1);
}
