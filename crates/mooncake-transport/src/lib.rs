//! mooncake-transport
