//! Embeds the eBPF programs. `cargo xtask` builds them and names the file in `ROUSE_EBPF_OBJECT`. Without it, an empty
//! stub keeps plain `cargo build` working on stable, and the agent refuses to start with the command to run.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=ROUSE_EBPF_OBJECT");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("rouse-ebpf");
    let object = match env::var_os("ROUSE_EBPF_OBJECT").filter(|path| !path.is_empty()) {
        Some(path) => {
            let path = PathBuf::from(path);
            println!("cargo::rerun-if-changed={}", path.display());
            fs::read(&path).unwrap_or_else(|error| {
                panic!("cannot read ROUSE_EBPF_OBJECT {}: {error}", path.display())
            })
        }
        None => Vec::new(),
    };
    fs::write(&out, object)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", out.display()));
}
