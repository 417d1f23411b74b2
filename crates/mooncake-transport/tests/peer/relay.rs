//! A name that stays while the real engine behind it is replaced.
//!
//! A real engine draws its ports at random, and the kernel keeps the ports of a
//! dead one for a minute; so a restart under the same name is played by a relay
//! in front of the engine.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// Passes control requests on, and data connections if asked to.
pub(crate) struct Relay {
    control: SocketAddr,
    /// Set if the engine's descriptor is changed to name our data listener.
    data: Option<SocketAddr>,
    target: Arc<Mutex<Target>>,
    stop: Arc<AtomicBool>,
}

#[derive(Clone, Copy)]
struct Target {
    control: SocketAddr,
    data: SocketAddr,
}

impl Relay {
    /// A relay in front of the engine at `session`. With `keeps_data_port` the
    /// data listener keeps its address across replacements too.
    pub(crate) fn new(session: &str, keeps_data_port: bool) -> Self {
        let target = Arc::new(Mutex::new(Target::of(session)));
        let stop = Arc::new(AtomicBool::new(false));
        let data = keeps_data_port.then(|| {
            listen(&stop, {
                let target = target.clone();
                move |stream| {
                    let to = target.lock().unwrap().data;
                    pump(stream, to);
                }
            })
        });
        let control = listen(&stop, {
            let target = target.clone();
            move |stream| {
                let to = target.lock().unwrap().control;
                // An engine that is gone shows as a closed connection.
                let _ = pass_control(stream, to, data);
            }
        });
        Self {
            control,
            data,
            target,
            stop,
        }
    }

    /// The name to dial.
    pub(crate) fn session(&self) -> String {
        self.control.to_string()
    }

    /// Puts another engine behind the name.
    pub(crate) fn replace(&self, session: &str) {
        *self.target.lock().unwrap() = Target::of(session);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for address in [Some(self.control), self.data].into_iter().flatten() {
            // Wakes the listener, which then sees the flag.
            let _ = TcpStream::connect(address);
        }
    }
}

impl Target {
    fn of(session: &str) -> Self {
        let control: SocketAddr = session.parse().expect("a numeric session");
        let request = b"\x03\0\0\0\0\0\0\0\x01{}";
        let reply = ask(control, request).expect("the engine answers");
        let descriptor: Value = serde_json::from_slice(&reply[9..]).expect("a descriptor");
        let port = descriptor["tcp_data_port"].as_u64().expect("a data port");
        Self {
            control,
            data: SocketAddr::new(control.ip(), u16::try_from(port).unwrap()),
        }
    }
}

fn listen(
    stop: &Arc<AtomicBool>,
    serve: impl Fn(TcpStream) + Clone + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stop = stop.clone();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            if stop.load(Ordering::SeqCst) {
                return;
            }
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    address
}

/// One request and its reply.
fn ask(to: SocketAddr, request: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(request)?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    Ok(reply)
}

fn pass_control(
    mut stream: TcpStream,
    to: SocketAddr,
    data: Option<SocketAddr>,
) -> std::io::Result<()> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let mut request = length.to_vec();
    request.resize(8 + usize::try_from(u64::from_le_bytes(length)).unwrap(), 0);
    stream.read_exact(&mut request[8..])?;
    let mut reply = ask(to, &request)?;
    if let (Some(data), Some(1)) = (data, reply.get(8)) {
        let mut descriptor: Value = serde_json::from_slice(&reply[9..])?;
        descriptor["tcp_data_port"] = data.port().into();
        let text = descriptor.to_string();
        reply = (text.len() as u64 + 1).to_le_bytes().to_vec();
        reply.push(1);
        reply.extend(text.as_bytes());
    }
    stream.write_all(&reply)
}

/// Copies both ways until either side ends, then ends the other.
fn pump(client: TcpStream, to: SocketAddr) {
    let Ok(server) = TcpStream::connect(to) else {
        return;
    };
    let copy = |mut from: TcpStream, mut into: TcpStream| {
        let _ = std::io::copy(&mut from, &mut into);
        let _ = from.shutdown(Shutdown::Both);
        let _ = into.shutdown(Shutdown::Both);
    };
    let (client_too, server_too) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    thread::spawn(move || copy(client_too, server_too));
    copy(server, client);
}
