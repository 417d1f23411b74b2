//! Random values survive the codecs, and random bytes never make them panic.

use mooncake_transport::wire::control::{
    Frame, FrameDecoder, FrameKind, FrameLimits, Notice, check_connection, check_json, encode_frame,
};
use mooncake_transport::wire::data::{DataVersion, Header, Op, Status};
use mooncake_transport::wire::descriptor::{BufferRange, Descriptor, timestamp};
use mooncake_transport::wire::name::PeerName;
use proptest::prelude::*;

fn version() -> impl Strategy<Value = DataVersion> {
    prop_oneof![Just(DataVersion::V1), Just(DataVersion::V2)]
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let buffer =
        (1..=u64::MAX, 1..=u64::MAX).prop_map(|(address, len)| BufferRange { address, len });
    (
        "\\PC{1,40}",
        proptest::option::of("[a-z0-9.:]{1,20}"),
        1..=u16::MAX,
        version(),
        proptest::collection::vec(buffer, 0..20),
        any::<u32>(),
    )
        .prop_map(|(name, data_host, data_port, version, buffers, seconds)| {
            let mut descriptor = Descriptor::new(name, data_port);
            descriptor.data_host = data_host;
            descriptor.version = version;
            descriptor.buffers = buffers;
            descriptor.timestamp = timestamp(std::time::Duration::from_secs(seconds.into()));
            descriptor
        })
}

/// Text that looks enough like the real thing to get past the first checks.
fn almost_json() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        proptest::sample::select(
            [
                "{",
                "}",
                "[",
                "]",
                "\"",
                ":",
                ",",
                "/*",
                "*/",
                "//",
                "\n",
                "\\",
                "null",
                "1e2",
                "-1",
                "\"name\"",
                "\"protocol\"",
                "\"tcp\"",
                "\"tcp_data_port\"",
                "\"buffers\"",
                "\"addr\"",
                "\"length\"",
                "\"notify_msg\"",
                "true",
                "18446744073709551616",
            ]
            .map(str::as_bytes)
            .map(<[u8]>::to_vec)
            .to_vec()
        ),
        proptest::collection::vec(any::<u8>(), 0..4),
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn property_headers_round_trip(size: u64, address: u64, write: bool, version in version()) {
        let op = if write { Op::Write } else { Op::Read };
        let header = Header { size, address, op, version };
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn property_any_24_bytes_are_a_header_or_an_unknown_operation(bytes: [u8; 24]) {
        match Header::decode(&bytes) {
            Ok(header) => prop_assert_eq!(&header.encode()[..17], &bytes[..17]),
            Err(error) => prop_assert!(error.opcode & 0x7F > 1),
        }
    }

    #[test]
    fn property_any_8_bytes_are_a_status_or_refused(bytes: [u8; 8]) {
        match Status::decode(bytes) {
            Ok(status) => prop_assert_eq!(status.encode(), bytes),
            Err(error) => prop_assert_eq!(error.word, u64::from_le_bytes(bytes)),
        }
    }

    #[test]
    fn property_descriptors_round_trip(descriptor in descriptor()) {
        let decoded = Descriptor::decode(descriptor.encode().as_bytes());
        prop_assert_eq!(decoded, Ok(descriptor));
    }

    #[test]
    fn property_notices_round_trip(name in "\\PC{0,40}", message in "(?s).{0,200}") {
        let notice = Notice { name, message };
        prop_assert_eq!(Notice::decode(notice.encode().as_bytes()), Ok(notice));
    }

    #[test]
    fn property_frames_round_trip_in_any_pieces(
        kind in 0..4usize,
        body in proptest::collection::vec(any::<u8>(), 0..300),
        cuts in proptest::collection::vec(1..50usize, 0..20),
    ) {
        let kinds = [
            FrameKind::Connection, FrameKind::Metadata, FrameKind::Notify, FrameKind::Probe,
        ];
        let frame = Frame { kind: kinds[kind], body };
        let bytes = encode_frame(frame.kind, &frame.body);
        let mut decoder = FrameDecoder::new(FrameLimits::CLIENT);
        let mut rest = &bytes[..];
        let mut decoded = None;
        for cut in cuts.into_iter().chain([usize::MAX]) {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            rest = after;
            decoded = decoded.or(decoder.push(piece).unwrap());
        }
        prop_assert_eq!(decoded, Some(frame));
    }

    #[test]
    fn property_random_bytes_never_panic_a_decoder(
        bytes in prop_oneof![proptest::collection::vec(any::<u8>(), 0..200), almost_json()],
        small_length in any::<bool>(),
    ) {
        if let Ok(descriptor) = Descriptor::decode(&bytes) {
            let held = descriptor.buffers.len() * size_of::<BufferRange>();
            prop_assert!(held <= bytes.len());
        }
        let _ = Notice::decode(&bytes);
        let _ = check_connection(&bytes);
        let _ = check_json(&bytes);
        let _ = PeerName::parse(&String::from_utf8_lossy(&bytes));
        for limits in [FrameLimits::SERVER, FrameLimits::CLIENT] {
            let mut decoder = FrameDecoder::new(limits);
            if small_length {
                let _ = decoder.push(&(bytes.len() as u64).to_le_bytes());
            }
            for piece in bytes.chunks(7) {
                let _ = decoder.push(piece);
            }
        }
    }

    #[test]
    fn property_what_is_kept_of_buffers_is_less_than_their_text(
        kinds in proptest::collection::vec(0..6usize, 0..60),
        several: bool,
    ) {
        let entries = [
            r#"{"name":"n","addr":1,"length":1}"#,
            r#"{"name":"n","addr":1,"length":1,"protocol":"tcp"}"#,
            r#"{"protocol":"tcp"}"#,
            r#"{"name":1,"addr":true,"length":1e0}"#,
            "0",
            "{}",
        ];
        let list: Vec<&str> = kinds.iter().map(|kind| entries[*kind]).collect();
        let protocol = if several { r#"["tcp","rdma"]"# } else { r#""tcp""# };
        let text = format!(
            r#"{{"buffers":[{}],"tcp_data_port":9,"protocol":{protocol}}}"#,
            list.join(",")
        );
        // The naive account: which entries count, and whether all of those are complete.
        let counted = kinds.iter().filter(|kind| !several || [1, 2].contains(*kind));
        let expected = counted
            .map(|kind| [0, 1, 3].contains(kind))
            .collect::<Vec<bool>>();
        match Descriptor::decode(text.as_bytes()) {
            Ok(descriptor) => {
                prop_assert!(expected.iter().all(|complete| *complete));
                prop_assert_eq!(descriptor.buffers.len(), expected.len());
                let held = descriptor.buffers.capacity() * size_of::<BufferRange>();
                prop_assert!(held <= text.len() + 64);
            }
            Err(_) => prop_assert!(expected.contains(&false)),
        }
    }

    #[test]
    fn property_names_print_and_parse_back(name in "[a-z0-9.:%\\[\\]-]{1,40}") {
        if let Ok(parsed) = PeerName::parse(&name) {
            let again = PeerName::parse(&parsed.to_string());
            if !parsed.host().contains([':', '[', ']', '%']) {
                prop_assert_eq!(again, Ok(parsed));
            }
        }
    }
}
