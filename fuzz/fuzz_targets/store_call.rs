//! Calls to metadata stores whose server answers every connection with the same bytes, whatever it is asked: the call
//! ends, with what those bytes say or an error that blames them.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libfuzzer_sys::fuzz_target;
use mooncake_transport::metadata::{EtcdStore, HttpStore, MetadataStore, RedisStore, StoreError};
use slab_fuzz::within_reach_of;

const KEY: &str = "mooncake/ram/a:1";

/// Buffers of a fixed size: those of connections, and the parser's for Redis.
const BUFFERS: usize = 1_000;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, wire)) = bytes.split_first() else {
        return;
    };
    let server = server();
    let stores: [&dyn MetadataStore; 3] = [&server.http, &server.etcd, &server.redis];
    let store = stores[usize::from(first & 3) % 3];
    let len_max = [0, 5, 64, 1 << 20][usize::from(first >> 6)];
    let call = |wire: &[u8]| {
        *server.wire.lock().unwrap_or_else(PoisonError::into_inner) = wire.to_vec();
        match first >> 2 & 7 {
            0..4 => store.get(KEY, len_max),
            4 => store.put(KEY, b"{}").map(|()| None),
            5 => store.delete(KEY).map(had),
            6 => store.swap(KEY, None, Some(b"{}")).map(had),
            _ => store.swap(KEY, Some(b"{}"), None).map(had),
        }
    };
    let found = within_reach_of(wire.len() + BUFFERS, || call(wire));
    match &found {
        Ok(Some(value)) => assert!(value.len() as u64 <= len_max, "{} bytes", value.len()),
        Ok(None) => {}
        // The bytes may be less than an answer.
        Err(StoreError::Connection { source, .. })
            if source.kind() == std::io::ErrorKind::UnexpectedEof => {}
        Err(
            StoreError::Unreachable { .. }
            | StoreError::Timeout { .. }
            | StoreError::Connection { .. },
        ) => panic!("the server was there and the bytes came: {found:?}"),
        Err(_) => {}
    }
    if let (Ok(_), Some((_, cut))) = (&found, wire.split_last()) {
        let again = call(cut);
        assert!(
            again == found || again.is_err(),
            "{again:?}, whole {found:?}"
        );
    }
});

/// What a call says of the key, in the place of a value.
fn had(had: bool) -> Option<Vec<u8>> {
    had.then(Vec::new)
}

struct Server {
    wire: Arc<Mutex<Vec<u8>>>,
    http: HttpStore,
    etcd: EtcdStore,
    redis: RedisStore,
}

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address: SocketAddr = listener.local_addr().expect("it is bound");
        let wire = Arc::new(Mutex::new(Vec::new()));
        let served = Arc::clone(&wire);
        std::thread::spawn(move || {
            let mut read = vec![0; 4096];
            for mut stream in listener.incoming().map_while(Result::ok) {
                let _ = serve(&mut stream, &served, &mut read);
            }
        });
        Server {
            wire,
            http: HttpStore::new(&format!("http://{address}/metadata")).expect("an address"),
            etcd: EtcdStore::new(&address.to_string()).expect("an address"),
            redis: RedisStore::new(&format!("redis://{address}")).expect("an address"),
        }
    })
}

/// Says everything at once, and reads to the end, so that what was said is not destroyed by a reset.
fn serve(stream: &mut TcpStream, wire: &Mutex<Vec<u8>>, read: &mut [u8]) -> std::io::Result<()> {
    stream.write_all(&wire.lock().unwrap_or_else(PoisonError::into_inner))?;
    stream.shutdown(Shutdown::Write)?;
    while stream.read(read)? > 0 {}
    Ok(())
}
