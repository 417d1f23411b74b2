//! Starts an engine of Mooncake's own library, where there is one, and says what peers dial.
//!
//! `MOONCAKE_LIBRARY=PATH cargo run -p mooncake-transport --features ffi --example library`

use std::error::Error;

use mooncake_transport::Engine;
use mooncake_transport::ffi::{FfiConfig, FfiEngine, FfiLibrary, LibraryError};

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: what MOONCAKE_LIBRARY names, or the system's loader finds, is Mooncake's library.
    let library = match unsafe { FfiLibrary::load() } {
        Ok(library) => library,
        Err(error @ LibraryError::Missing { .. }) => {
            println!("nothing to do: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    println!("loaded {}", library.file().display());
    let engine = FfiEngine::start(&library, FfiConfig::new("127.0.0.1"))?;
    println!("peers dial {}", engine.session());
    engine.shut_down(None);
    Ok(())
}
