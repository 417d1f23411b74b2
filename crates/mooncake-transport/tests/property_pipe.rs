//! Random tensors through a pair of pipes, in both directions at once.
#![cfg(feature = "pipe")]

mod pipe_support;

use mooncake_transport::pipe::{Dtype, Message, Pipe, PipeReceiver, PipeSender, Tensor};
use pipe_support::{LONG, bytes, pair};
use proptest::prelude::*;

/// What is sent in one place of a direction.
#[derive(Clone, Debug)]
enum Item {
    Tensor {
        dtype: Dtype,
        shape: Vec<u64>,
        seed: u64,
    },
    NoTensor,
}

impl Item {
    fn data(&self) -> Vec<u8> {
        let Self::Tensor { dtype, shape, seed } = self else {
            return Vec::new();
        };
        let bits = shape.iter().product::<u64>() * dtype.bits();
        bytes(*seed, (bits / 8) as usize)
    }

    fn send(&self, sender: &mut PipeSender) {
        match self {
            Self::Tensor { dtype, shape, .. } => {
                let tensor = Tensor {
                    dtype: *dtype,
                    shape,
                    bytes: &self.data(),
                };
                sender.send(tensor, LONG).unwrap();
            }
            Self::NoTensor => sender.send_none(LONG).unwrap(),
        }
    }

    fn assert_received(&self, receiver: &mut PipeReceiver) {
        match (self, receiver.recv(LONG).unwrap()) {
            (Self::Tensor { dtype, shape, .. }, Message::Tensor(received)) => {
                assert_eq!((received.dtype(), received.shape()), (*dtype, &shape[..]));
                assert!(received.to_vec().unwrap() == self.data(), "{self:?}");
            }
            (Self::NoTensor, Message::NoTensor) => {}
            (sent, received) => panic!("{sent:?} became {received:?}"),
        }
    }
}

fn item() -> impl Strategy<Value = Item> {
    // The last dimension is a multiple of four, so that elements of four and six bits fill bytes.
    let shape = (prop::collection::vec(0..7_u64, 0..4), 0..40_u64).prop_map(|(mut dims, last)| {
        dims.push(4 * last);
        dims
    });
    let tensor = (prop::sample::select(Dtype::ALL), shape, any::<u64>());
    prop_oneof![
        9 => tensor.prop_map(|(dtype, shape, seed)| Item::Tensor { dtype, shape, seed }),
        1 => Just(Item::NoTensor),
    ]
}

fn directions(pipe: Pipe, sent: Vec<Item>, expected: Vec<Item>) {
    let (mut sender, mut receiver) = pipe.split();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for item in &sent {
                item.send(&mut sender);
            }
            sender.flush(LONG).unwrap();
        });
        for item in &expected {
            item.assert_received(&mut receiver);
        }
    });
    assert_eq!(sender.outstanding(), 0);
    assert_eq!(sender.bytes_in_use(), 0);
    assert_eq!(receiver.bytes_in_use(), 0);
    // The other side may still wait for an answer that is on its way.
    sender.close(LONG).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    // row: P8.1, P8.2
    #[test]
    fn property_tensors_keep_type_shape_bytes_and_order_both_ways_and_leave_no_buffer(
        there in prop::collection::vec(item(), 0..30), back in prop::collection::vec(item(), 0..30),
    ) {
        let (prefill, decode) = pair();
        let (there_too, back_too) = (there.clone(), back.clone());
        std::thread::scope(|scope| {
            scope.spawn(move || directions(prefill, there, back));
            directions(decode, back_too, there_too);
        });
    }
}
