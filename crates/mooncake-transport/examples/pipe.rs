//! Sends tensors both ways through a pipe whose two sides are in one process.
//!
//! `cargo run --release -p mooncake-transport --features pipe --example pipe`

use std::error::Error;
use std::net::TcpListener;
use std::time::Duration;

use mooncake_transport::pipe::{Dtype, Message, Pipe, PipeConfig, PipeOptions, Role, Tensor};

fn main() -> Result<(), Box<dyn Error>> {
    let wait = Duration::from_secs(20);
    // In real life both sides read the same file, which MOONCAKE_CONFIG_PATH names.
    let (prefill_port, decode_port) = free_ports().ok_or("no free ports on this machine")?;
    let config = PipeConfig::from_json(
        format!(
            r#"{{"prefill_url": "127.0.0.1:{prefill_port}", "decode_url": "127.0.0.1:{decode_port}",
                "metadata_server": "P2PHANDSHAKE"}}"#
        )
        .as_bytes(),
    )?;
    let mut prefill = Pipe::start(&config, Role::Prefill, 0, PipeOptions::default())?;
    let mut decode = Pipe::start(&config, Role::Decode, 0, PipeOptions::default())?;

    let question: Vec<u8> = (0..24_u8).collect();
    prefill.sender().send(
        Tensor {
            dtype: Dtype::F32,
            shape: &[2, 3],
            bytes: &question,
        },
        wait,
    )?;
    match decode.receiver().recv(wait)? {
        Message::Tensor(tensor) => {
            if tensor.to_vec()? != question {
                return Err("the bytes differ".into());
            }
            println!("decode has {} {:?}", tensor.dtype(), tensor.shape());
        }
        Message::NoTensor => return Err("no tensor, though one was sent".into()),
    }

    decode.sender().send_none(wait)?;
    match prefill.receiver().recv(wait)? {
        Message::Tensor(_) => return Err("a tensor, though none was sent".into()),
        Message::NoTensor => println!("prefill was told that there is none"),
    }
    // Each side waits until the other has everything, which it has.
    prefill.close(wait)?;
    decode.close(wait)?;
    Ok(())
}

/// Two ports that, with those derived from them (9 and 10 above each), are free now.
fn free_ports() -> Option<(u16, u16)> {
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let all_free = |base: u16| is_free(base) && is_free(base + 9) && is_free(base + 10);
    let mut bases = (21_000..29_000).step_by(11).filter(|base| all_free(*base));
    Some((bases.next()?, bases.next()?))
}
