//! ec-connector
