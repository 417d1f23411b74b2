//! A pipe against a peer made by hand, which speaks the old protocol and then something else.
#![cfg(feature = "pipe")]

mod pipe_support;

use std::sync::Arc;
use std::time::Duration;

use mooncake_transport::pipe::frame::{
    AnswerError, ImageError, Note, Notice, NoticeError, none_image,
};
use mooncake_transport::pipe::{
    Broken, Dialect, Dtype, Message, Pipe, PipeOptions, ReadFailure, RecvError, Role, SendError,
    Tensor, Waiting,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Engine, Reason, Remote};
use pipe_support::{
    LONG, OldPeer, assert_receives, bytes, config, free_bases, image_of, options, recv_broken,
    send, send_broken, start, within,
};

fn ours_with(change: impl Fn(&mut PipeOptions)) -> (Pipe, OldPeer) {
    let bases = free_bases();
    let mut options = options();
    change(&mut options);
    let pipe = start(&config(bases), Role::Prefill, options);
    (pipe, OldPeer::start(bases))
}

fn ours() -> (Pipe, OldPeer) {
    ours_with(|_| {})
}

/// A direction that has ended does not hold up the close, and all buffers come back.
fn assert_closes(pipe: Pipe) {
    within(Duration::from_secs(5), || drop(pipe));
}

// row: P8.3
#[test]
fn a_peer_of_the_old_kind_sends_to_us() {
    let (mut pipe, peer) = ours();
    for seed in 0..5 {
        let data = bytes(seed, 1_000 + seed as usize);
        peer.send_image(seed * 4096, &image_of(&data));
        assert_receives(&mut pipe, seed, 1_000 + seed as usize);
        assert_eq!(peer.answer(), [b"ACK".to_vec()]);
    }
    peer.send_image(0, &none_image());
    let received = pipe.receiver().recv(LONG).unwrap();
    assert!(matches!(received, Message::NoTensor));
    assert_eq!(peer.answer(), [b"ACK".to_vec()]);
    assert_eq!(pipe.receiver().bytes_in_use(), 0);
}

// row: P8.3, P8.2
#[test]
fn a_peer_of_the_old_kind_receives_from_us() {
    for dialect in [Dialect::Extended, Dialect::Plain] {
        let (mut pipe, peer) = ours_with(|options| options.dialect = dialect);
        for seed in 0..5 {
            send(&mut pipe, seed, 999).unwrap();
            let (image, frames) = peer.take();
            // The header is padded to eight bytes; the data are behind it.
            let header_len = u64::from_le_bytes(image[..8].try_into().unwrap()) as usize;
            assert_eq!(header_len % 8, 0);
            assert_eq!(image[8], b'{');
            assert!(image[8 + header_len..] == bytes(seed, 999));
            let expected = if dialect == Dialect::Plain { 2 } else { 3 };
            assert_eq!(frames.len(), expected);
            peer.acknowledge();
        }
        pipe.sender().send_none(LONG).unwrap();
        assert_eq!(peer.take().0, none_image());
        peer.acknowledge();
        pipe.sender().flush(LONG).unwrap();
        assert_eq!(pipe.sender().bytes_in_use(), 0);
        pipe.close(LONG).unwrap();
    }
}

// row: P7.5, P7.6
#[test]
fn an_old_peer_is_never_sent_what_it_would_misread() {
    let (mut pipe, peer) = ours();
    send(&mut pipe, 1, 10).unwrap();
    peer.take();
    peer.acknowledge();
    pipe.sender().flush(LONG).unwrap();
    let none = (-150_886_311_i64).to_le_bytes();
    let mut refused = |shape: &[u64]| {
        let tensor = Tensor {
            dtype: Dtype::I64,
            shape,
            bytes: &none,
        };
        pipe.sender().send(tensor, LONG).unwrap_err()
    };
    assert!(matches!(refused(&[1]), SendError::LooksLikeNone { .. }));
    assert_eq!(refused(&[]), SendError::NoDimensions);
}

// row: P7.5
#[test]
fn only_the_documented_form_is_no_tensor() {
    let (mut pipe, peer) = ours();
    let with_shape = |shape: &str| {
        let header =
            format!(r#"{{"tensor":{{"dtype":"I64","shape":{shape},"data_offsets":[0,8]}}}}"#);
        let mut image = (header.len() as u64).to_le_bytes().to_vec();
        image.extend_from_slice(header.as_bytes());
        image.extend_from_slice(&(-150_886_311_i64).to_le_bytes());
        image
    };
    for (shape, is_none) in [("[1]", true), ("[1,1]", false), ("[]", false)] {
        peer.send_image(0, &with_shape(shape));
        let received = pipe.receiver().recv(LONG).unwrap();
        assert_eq!(matches!(received, Message::NoTensor), is_none, "{shape}");
    }
}

// row: P7.1, P8.4
#[test]
fn a_double_answer_ends_the_sending_direction_and_no_other() {
    let (mut pipe, peer) = ours();
    send(&mut pipe, 1, 10).unwrap();
    peer.take();
    peer.acknowledge();
    peer.acknowledge();
    // The second one comes a little after the first.
    let why = loop {
        match pipe.sender().poll() {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(SendError::Broken(why)) => break why,
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(why, Broken::Answer(AnswerError::Unexpected));
    assert_eq!(send(&mut pipe, 2, 10), Err(SendError::Broken(why)));
    peer.send_image(0, &image_of(&bytes(3, 10)));
    assert_receives(&mut pipe, 3, 10);
    assert_closes(pipe);
}

// row: P7.2, P8.4
#[test]
fn a_wrong_answer_keeps_the_buffer_until_the_close() {
    let cases: [(&[&[u8]], AnswerError); 4] = [
        (&[b"NO"], AnswerError::Word),
        (&[b""], AnswerError::Word),
        (&[b"ACK", b"1"], AnswerError::IdLen { len: 1 }),
        (
            &[b"ACK", b"", b"", b"", b""],
            AnswerError::FrameCount { count: 4 },
        ),
    ];
    for (frames, error) in cases {
        let (mut pipe, peer) = ours();
        send(&mut pipe, 1, 100).unwrap();
        let (image, notice) = peer.take();
        peer.send_answer(frames);
        assert_eq!(send_broken(&mut pipe), Broken::Answer(error));
        assert_eq!(pipe.sender().outstanding(), 1);
        // The peer may be reading it, so it is as it was.
        let address = u64::from_be_bytes(notice[0][..].try_into().unwrap());
        assert!(peer.read(address, image.len() as u64).unwrap() == image);
        assert_closes(pipe);
    }
}

// row: P7.1, P8.4
#[test]
fn an_answer_with_another_number_is_refused() {
    let (mut pipe, peer) = ours();
    send(&mut pipe, 1, 10).unwrap();
    let (_, frames) = peer.take();
    let notice = Notice::decode(&frames).unwrap();
    let id = notice.note.unwrap().id;
    peer.send_answer(&[b"ACK", &(id + 1).to_be_bytes()]);
    let expected = id;
    let id = id + 1;
    assert_eq!(
        send_broken(&mut pipe),
        Broken::Answer(AnswerError::Sequence { id, expected })
    );
}

// row: P7.3, P8.4
#[test]
fn a_peer_that_gives_up_frees_the_buffer_and_ends_the_direction() {
    let (mut pipe, peer) = ours();
    send(&mut pipe, 1, 10).unwrap();
    peer.take();
    peer.send_answer(&[b"NAK"]);
    assert_eq!(send_broken(&mut pipe), Broken::PeerFailed);
    assert_eq!(pipe.sender().bytes_in_use(), 0);
    assert_closes(pipe);
}

// row: P7.7, P8.4
#[test]
fn a_missing_answer_is_an_error_in_time() {
    let timeout = Duration::from_millis(300);
    let (mut pipe, peer) = ours_with(|options| options.answer_timeout = timeout);
    send(&mut pipe, 1, 10).unwrap();
    peer.take();
    let why = within(Duration::from_secs(5), || send_broken(&mut pipe));
    assert_eq!(why, Broken::NoAnswer { timeout_ms: 300 });
    assert_closes(pipe);
}

// row: P7.3, P8.4
#[test]
fn a_failed_read_is_tried_again_answered_and_ends_the_receiving_direction() {
    let (mut pipe, mut peer) = ours();
    peer.unregister();
    peer.send_image(0, &image_of(&bytes(1, 100)));
    let why = recv_broken(&mut pipe);
    assert_eq!(why, Broken::Read(ReadFailure::Task(Reason::Rejected)));
    assert_eq!(peer.answer(), [b"NAK".to_vec()]);
    assert_eq!(pipe.receiver().bytes_in_use(), 0);
    // The other direction goes on.
    send(&mut pipe, 2, 10).unwrap();
    peer.take();
    peer.acknowledge();
    pipe.close(LONG).unwrap();
}

// row: P7.16
#[test]
fn an_engine_that_restarted_under_its_name_is_found_again() {
    let (mut pipe, mut peer) = ours();
    for seed in 0..3 {
        peer.send_image(0, &image_of(&bytes(seed, 5_000)));
        assert_receives(&mut pipe, seed, 5_000);
        assert_eq!(peer.answer(), [b"ACK".to_vec()]);
        peer.restart_engine();
    }
}

// row: P7.11, P8.4
#[test]
fn an_address_that_is_not_the_peers_cannot_be_read() {
    let (mut pipe, peer) = ours();
    peer.notify(0xDEAD_0000, 100);
    let why = recv_broken(&mut pipe);
    assert!(matches!(why, Broken::Read(_)), "{why}");
    assert_eq!(peer.answer(), [b"NAK".to_vec()]);
    assert_closes(pipe);
}

// row: P7.11, P8.4
#[test]
fn a_length_beyond_all_buffers_is_refused_without_reserving() {
    let (mut pipe, peer) = ours();
    let (len, max) = ((1 << 20) + 1, 1 << 20);
    peer.notify(peer.slab.address(), len);
    assert_eq!(recv_broken(&mut pipe), Broken::TooLong { len, max });
    assert_eq!(peer.answer(), [b"NAK".to_vec()]);
    assert_eq!(pipe.receiver().bytes_in_use(), 0);
}

// row: P7.12, P8.4
#[test]
fn frames_that_are_no_notice_are_answered_and_end_the_receiving_direction() {
    let eight = || vec![0; 8];
    let cases = [
        (vec![eight()], NoticeError::FrameCount { count: 1 }),
        (vec![eight(); 4], NoticeError::FrameCount { count: 4 }),
        (vec![eight(); 9], NoticeError::FrameCount { count: 4 }),
        (
            vec![vec![0; 7], eight()],
            NoticeError::FrameLen { index: 0, len: 7 },
        ),
        (
            vec![eight(), Vec::new()],
            NoticeError::FrameLen { index: 1, len: 0 },
        ),
        (vec![eight(), eight(), b"{".to_vec()], NoticeError::Note),
        (
            vec![eight(), eight(), br#"{"v":9}"#.to_vec()],
            NoticeError::Version { version: 9 },
        ),
    ];
    for (frames, error) in cases {
        let (mut pipe, peer) = ours();
        peer.send_frames(&frames);
        assert_eq!(recv_broken(&mut pipe), Broken::Notice(error));
        assert_eq!(peer.answer(), [b"NAK".to_vec()]);
        assert_closes(pipe);
    }
}

// row: P7.12
#[test]
fn a_frame_beyond_every_bound_ends_the_connection() {
    let (mut pipe, peer) = ours();
    peer.send_image(0, &image_of(&bytes(1, 10)));
    assert_receives(&mut pipe, 1, 10);
    peer.send_frames(&[vec![0; 8], vec![0; 8], vec![b' '; 1 << 20]]);
    let why = within(LONG, || recv_broken(&mut pipe));
    assert!(
        matches!(why, Broken::PeerGone | Broken::PeerRestarted),
        "{why}"
    );
}

// row: P7.15, P8.4
#[test]
fn bytes_that_are_no_image_are_answered_and_end_the_receiving_direction() {
    let mut short_data = image_of(&bytes(1, 100));
    short_data.pop();
    let mut long_data = image_of(&bytes(1, 100));
    long_data.push(0);
    for image in [
        Vec::new(),
        vec![0; 7],
        vec![0; 8],
        vec![255; 100],
        b"not an image of any kind, but long enough".to_vec(),
        short_data,
        long_data,
    ] {
        let (mut pipe, peer) = ours();
        peer.send_image(0, &image);
        let why = recv_broken(&mut pipe);
        assert!(matches!(why, Broken::Image(_)), "{why}: {image:?}");
        if image.len() == 8 {
            assert_eq!(why, Broken::Image(ImageError::Header));
        }
        assert_eq!(peer.answer(), [b"NAK".to_vec()]);
        assert_eq!(pipe.receiver().bytes_in_use(), 0);
        assert_closes(pipe);
    }
}

// row: P7.1
#[test]
fn a_peer_of_our_kind_is_answered_by_number_and_found_by_its_session() {
    let (mut pipe, peer) = ours();
    let notice = |id: u64, session: String| Notice {
        address: peer.slab.address(),
        len: image_of(&bytes(1, 10)).len() as u64,
        note: Some(Note {
            session,
            id,
            is_none: false,
        }),
    };
    let session = peer.engine.session().to_owned();
    peer.slab.copy_in(0, &image_of(&bytes(1, 10))).unwrap();
    for id in [70, 71] {
        peer.send_frames(&notice(id, session.clone()).encode());
        assert_receives(&mut pipe, 1, 10);
        assert_eq!(peer.answer(), [b"ACK".to_vec(), id.to_be_bytes().to_vec()]);
    }
    // One is missing.
    peer.send_frames(&notice(73, session).encode());
    let (id, expected) = (73, 72);
    assert_eq!(
        recv_broken(&mut pipe),
        Broken::Notice(NoticeError::Sequence { id, expected })
    );
}

// row: P7.7
#[test]
fn an_engine_that_cannot_be_reached_is_an_error_in_time() {
    let (mut pipe, peer) = ours();
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let notice = Notice {
        address: 0x1000,
        len: 100,
        note: Some(Note {
            session: gone,
            id: 1,
            is_none: false,
        }),
    };
    peer.send_frames(&notice.encode());
    let why = within(LONG, || recv_broken(&mut pipe));
    assert!(matches!(why, Broken::Read(ReadFailure::Open(_))), "{why}");
    assert_eq!(
        peer.answer(),
        [b"NAK".to_vec(), 1_u64.to_be_bytes().to_vec()]
    );
}

// row: P7.7, P8.4
#[test]
fn an_engine_that_never_answers_ends_the_receiving_direction_in_time() {
    let timeout = Duration::from_millis(300);
    let (mut pipe, peer) = ours_with(|options| options.read_timeout = timeout);
    // It accepts, and that is all.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let notice = Notice {
        address: 0x1000,
        len: 100,
        note: Some(Note {
            session: silent.local_addr().unwrap().to_string(),
            id: 1,
            is_none: false,
        }),
    };
    peer.send_frames(&notice.encode());
    let why = within(LONG, || recv_broken(&mut pipe));
    assert!(matches!(why, Broken::Read(ReadFailure::Open(_))), "{why}");
    assert_closes(pipe);
}

// row: P7.3
#[test]
fn an_answer_that_cannot_be_sent_yet_loses_nothing() {
    let bases = free_bases();
    // Its socket for answers is not there yet.
    let mut peer = OldPeer::start(bases);
    let context = zmq::Context::new();
    peer.received_answers = context.socket(zmq::PULL).unwrap();
    let mut pipe = start(&config(bases), Role::Prefill, options());
    peer.send_image(0, &image_of(&bytes(1, 10)));
    for _ in 0..2 {
        let refused = pipe.receiver().recv(Duration::from_millis(300)).map(drop);
        assert_eq!(refused, Err(RecvError::TimedOut(Waiting::Peer)));
    }
    peer.received_answers.set_rcvtimeo(20_000).unwrap();
    let endpoint = format!("tcp://127.0.0.1:{}", bases.0 + 10);
    peer.received_answers.connect(&endpoint).unwrap();
    assert_receives(&mut pipe, 1, 10);
    assert_eq!(peer.answer(), [b"ACK".to_vec()]);
}

// row: P7.9
#[test]
fn the_close_cuts_off_reads_of_what_was_not_answered() {
    let bases = free_bases();
    let mut engine = TcpConfig::default();
    engine.control_port = Some(bases.0);
    // It goes on after the pipe.
    let engine: Arc<dyn Engine> = Arc::new(TcpEngine::start(engine).unwrap());
    let kept = Arc::clone(&engine);
    let mut pipe = Pipe::with_engine(&config(bases), Role::Prefill, 0, options(), engine).unwrap();
    let peer = OldPeer::start(bases);
    send(&mut pipe, 1, 100).unwrap();
    let (image, frames) = peer.take();
    let address = u64::from_be_bytes(frames[0][..].try_into().unwrap());
    assert!(peer.read(address, image.len() as u64).unwrap() == image);
    let closed = within(LONG, || pipe.close(Duration::from_millis(50)));
    assert_eq!(closed, Err(SendError::TimedOut(Waiting::Answers)));
    let refused = peer.read(address, image.len() as u64);
    assert_eq!(refused, Err(Remote::Ended(Reason::Rejected)));
    drop(kept);
}
