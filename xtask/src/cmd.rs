//! One file per command: its arguments and `run`.

pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod ci;
pub(crate) mod coverage;
pub(crate) mod fixture;
pub(crate) mod fuzz;
pub(crate) mod gpu;
pub(crate) mod licences;
pub(crate) mod miri;
pub(crate) mod model;
pub(crate) mod nostd;
pub(crate) mod package;
pub(crate) mod test;
pub(crate) mod tidy;
