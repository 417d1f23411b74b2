//! Two engines that find each other by name in a metadata store, which has to run:
//! `cargo run --example named --features etcd -- etcd://127.0.0.1:2379`, or with `http` and
//! `http://127.0.0.1:8080/metadata`, or with `redis` and `redis://127.0.0.1:6379`. Without an address
//! it says which of these stores it was built with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{
    MetadataStore, StoreAddressError, StoreConfig, StoreEngine, StoreTimeouts, open_store,
};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::{Access, Engine, EngineError, Op, Task};
use slab_memory::HostSlab;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(address) = std::env::args().nth(1) else {
        for address in [
            "http://127.0.0.1:8080/metadata",
            "etcd://127.0.0.1:2379",
            "redis://127.0.0.1:6379",
        ] {
            match open_store(address, StoreTimeouts::default()) {
                Ok(_) => println!("{address}"),
                Err(error @ StoreAddressError::NotBuilt { .. }) => println!("{error}"),
                Err(error) => return Err(error.into()),
            }
        }
        return Ok(());
    };
    let store = open_store(&address, StoreTimeouts::default())?;
    let right = start(&store, "example-right")?;
    let left = start(&store, "example-left")?;

    let there = Arc::new(HostSlab::new(4_096)?);
    let _registration = right.register(there.clone(), Access::RemoteWrite)?;
    let here = Arc::new(HostSlab::new(4_096)?);
    here.copy_in(0, b"found by name")?;
    let task = Task {
        op: Op::Write,
        segment: left.open_segment("example-right")?,
        // Names the memory there; real peers pass it on beside the notification.
        remote: there.address(),
        memory: here,
        range: 0..13,
        hold: Box::new(()),
    };
    let batch = left.submit(vec![task]).map_err(|refused| refused.cause)?;
    let report = batch.wait(Some(Instant::now() + Duration::from_secs(10)));
    assert!(report.is_some_and(|report| report.is_applied()));
    let mut found = [0; 13];
    there.copy_out(0, &mut found)?;
    println!("{}", String::from_utf8_lossy(&found));
    // The names are free again.
    left.close()?;
    right.close()?;
    Ok(())
}

fn start(store: &Arc<dyn MetadataStore>, name: &str) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    StoreEngine::start(TcpConfig::default(), Arc::clone(store), named)
}
