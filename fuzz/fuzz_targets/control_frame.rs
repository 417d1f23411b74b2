//! Frames of the control connection and the notifications in them: split anywhere, they are the same frame or the
//! same error as a decoder that sees all bytes at once would find; what is decoded is encoded to what decodes alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_transport::wire::control::{
    Frame, FrameDecoder, FrameError, FrameKind, FrameLimits, Notice, check_connection, check_json,
    encode_frame,
};
use slab_fuzz::within_reach_of;

fuzz_target!(|bytes: &[u8]| {
    let Some((&split, wire)) = bytes.split_first() else {
        return;
    };
    for limits in [FrameLimits::CLIENT, FrameLimits::SERVER] {
        let expected = expect(wire, limits);
        let found = within_reach_of(wire.len(), || {
            let mut decoder = FrameDecoder::new(limits);
            decoder.push(wire)
        });
        assert_eq!(found, expected);
        let mut decoder = FrameDecoder::new(limits);
        assert_eq!(in_pieces(&mut decoder, wire, split), expected);
        // The end is final: an error stays, and a frame is not given twice.
        match &expected {
            Err(_) => assert_eq!(decoder.push(b"{}"), expected),
            Ok(Some(_)) => assert_eq!(decoder.push(wire), Ok(None)),
            Ok(None) => {}
        }
        if let Ok(Some(frame)) = expected
            && limits.store_metadata
        {
            check_frame(&frame);
        }
    }
});

fn in_pieces(
    decoder: &mut FrameDecoder,
    wire: &[u8],
    split: u8,
) -> Result<Option<Frame>, FrameError> {
    for piece in wire.chunks(usize::from(split % 16) + 1) {
        match decoder.push(piece) {
            Ok(None) => {}
            end => return end,
        }
        assert_eq!(decoder.push(&[]), Ok(None));
    }
    Ok(None)
}

/// The rules once more, over all bytes at once.
fn expect(wire: &[u8], limits: FrameLimits) -> Result<Option<Frame>, FrameError> {
    let Some((length, rest)) = wire.split_first_chunk() else {
        return Ok(None);
    };
    let len = u64::from_le_bytes(*length);
    let too_long = |max| match len > max {
        true => Err(FrameError::TooLong { len, max }),
        false => Ok(()),
    };
    if len == 0 {
        return Err(FrameError::Empty);
    }
    too_long(limits.metadata_bytes_max.max(limits.other_bytes_max))?;
    let Some(&byte) = rest.first() else {
        return Ok(None);
    };
    let kind = match byte {
        0 => FrameKind::Connection,
        1 => FrameKind::Metadata,
        2 => FrameKind::Notify,
        3 => FrameKind::Probe,
        b'{' => FrameKind::Untyped,
        _ => return Err(FrameError::UnknownType { byte }),
    };
    let is_metadata = kind == FrameKind::Metadata;
    too_long(match is_metadata {
        true => limits.metadata_bytes_max,
        false => limits.other_bytes_max,
    })?;
    let len = usize::try_from(len).expect("below the limits");
    let Some(text) = rest.get(usize::from(byte != b'{')..len) else {
        return Ok(None);
    };
    let body = match is_metadata && !limits.store_metadata {
        true => Vec::new(),
        false => text.to_vec(),
    };
    Ok(Some(Frame { kind, body }))
}

fn check_frame(frame: &Frame) {
    let again = encode_frame(frame.kind, &frame.body);
    let mut decoder = FrameDecoder::new(FrameLimits::CLIENT);
    assert_eq!(decoder.push(&again), Ok(Some(frame.clone())));

    let notice = within_reach_of(frame.body.len(), || Notice::decode(&frame.body));
    if let Ok(notice) = notice {
        assert_eq!(Notice::decode(notice.encode().as_bytes()), Ok(notice));
    }
    // What passes as a connection request is JSON, as a probe has to be.
    if check_connection(&frame.body).is_ok() {
        assert_eq!(check_json(&frame.body), Ok(()));
    }
}
