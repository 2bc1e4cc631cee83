//! Memory that a sleeping service costs the controller, counted by the allocator.
//!
//! `cargo bench -p controller`: reads manifests from their folder as `rouse apply` writes them, with a scale decision
//! on each. It ends when every object is written and the outbox has every subject. It prints one JSON line per number
//! of services.

use std::{alloc::System, fs, io::Write as _, path::Path, sync::Arc, time::Instant};

use common::{
    local_node::LocalNodeSpec,
    outbox::Outbox,
    wire::{ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision},
};
use controller::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::cluster_state::{ClusterState, ConditionType},
    shell::{
        local_files::{self, LocalFiles},
        runtime::ControllerRuntime,
    },
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[path = "support/sleepers.rs"]
mod sleepers;

use sleepers::service_manifest;

#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    for services in [1_000, 10_000] {
        let folder = std::env::temp_dir().join(format!("rouse-memory-{}", std::process::id()));
        let measured = runtime.block_on(measure(&folder, services));
        fs::remove_dir_all(&folder)?;
        measured?;
    }
    Ok(())
}

async fn measure(folder: &Path, services: usize) -> std::io::Result<()> {
    fs::create_dir_all(folder.join("manifests"))?;
    for at in 0..services {
        fs::write(
            folder.join(format!("manifests/default_sleeper-{at}.yaml")),
            service_manifest(at),
        )?;
    }
    let (empty, started) = (allocated_bytes(), Instant::now());
    let (node_spec, _node_spec_rx) = watch::channel(LocalNodeSpec::default());
    let shared = Arc::new(ControllerRuntime::new(
        ControllerStateMachine::new(ClusterState::default(), Outbox::new()),
        node_spec,
    ));
    let files = LocalFiles::open(folder, Arc::clone(&shared)).map_err(std::io::Error::other)?;
    for at in 0..services {
        shared.step(ControllerEvent::DecisionReceived(sleeping_decision(at)));
    }
    // Cancelled at once: it writes everything that is due, then returns.
    let ended = CancellationToken::new();
    ended.cancel();
    local_files::write_objects_until_shutdown(Arc::clone(&shared), folder.to_owned(), ended).await;
    let took = started.elapsed().as_secs_f64();
    let bytes = (allocated_bytes() - empty) / services;
    let ready = shared.with_machine(|machine| {
        let apps = machine.cluster().apps.values();
        apps.filter(|app| app.conditions.is_true(ConditionType::ServiceReady)).count()
    });
    assert_eq!(ready, services, "every service is ready");
    drop(files);
    writeln!(
        std::io::stdout(),
        r#"{{"case":"memory_per_service","subject":"controller","unit":"B","p50":{bytes},"n":{services},"seconds":{took:.2}}}"#
    )
}

/// Returns the bytes that are allocated and not freed.
fn allocated_bytes() -> usize {
    let stats = HEAP.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn sleeping_decision(at: usize) -> ScaleDecision {
    ScaleDecision {
        revision: NamespacedName::new("default", format!("sleeper-{at}-00001")),
        requested_scale: Some(0),
        connection_path: ConnectionPath::Activator,
        activator_count: 0,
        activity: RevisionActivity::Inactive,
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 70.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: "no load for the stable window".into(),
        inputs: None,
        wake_origin: None,
    }
}
