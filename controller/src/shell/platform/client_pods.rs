//! Shell: watch of the pods that NetworkPolicies may admit; as they may be many, begun once a policy selects pods.

use std::{collections::BTreeSet, sync::Arc};

use common::{once_signal::OnceSignal, wire::NamespacedName};
use futures::StreamExt as _;
use kube::{
    Api, ResourceExt as _,
    api::DynamicObject,
    runtime::watcher::{Config, Event},
};
use tokio::sync::watch;
use tracing::{info, warn};
use watches::{OutageChange, WatchOutage, watch_events};

use crate::{
    decide::machine::ControllerEvent,
    model::{network_policies::PolicyClientPod, object::ResourceKind},
    shell::{
        api::{
            client::api_resource,
            watches::{MAX_PAUSE, error_chain},
        },
        runtime::ControllerRuntime,
    },
};

/// Field selector of pods that still hold an address: a finished pod has given it back.
const LIVING_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// Follows all pods, from the time when `needed` becomes true. Sets `all_known` once the first list is complete.
pub(super) async fn watch_client_pods(
    client: kube::Client,
    shared: Arc<ControllerRuntime>,
    mut needed: watch::Receiver<bool>,
    all_known: OnceSignal,
) {
    if needed.wait_for(|it| *it).await.is_err() {
        return;
    }
    info!("a network policy names pods: all are followed");
    let api: Api<DynamicObject> = Api::all_with(client, &api_resource(ResourceKind::Pod));
    let mut events =
        std::pin::pin!(watch_events(api, Config::default().fields(LIVING_PODS), MAX_PAUSE));
    let mut outage = WatchOutage::default();
    // Pods deleted during a lost watch are found by comparing the new list with the known pods.
    let (mut known_pods, mut listed) = (BTreeSet::new(), BTreeSet::new());
    let report = |name: NamespacedName, client| {
        shared.step(ControllerEvent::ClientPodObserved { name, pod: client })
    };
    while let Some(event) = events.next().await {
        let change = outage.record(&event);
        if change == Some(OutageChange::Ended) {
            info!("watch of clients works again");
        }
        match event {
            Ok(Event::Init) => listed.clear(),
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => {
                let name = pod_name(&pod);
                listed.insert(name.clone());
                known_pods.insert(name.clone());
                let client =
                    serde_json::to_value(pod).ok().as_ref().and_then(PolicyClientPod::from_pod);
                report(name, client);
            }
            Ok(Event::Delete(pod)) => {
                let name = pod_name(&pod);
                known_pods.remove(&name);
                report(name, None);
            }
            Ok(Event::InitDone) => {
                let gone: Vec<NamespacedName> = known_pods.difference(&listed).cloned().collect();
                known_pods.retain(|it| listed.contains(it));
                gone.into_iter().for_each(|name| report(name, None));
                shared.step(ControllerEvent::ClientPodsListed);
                all_known.set();
            }
            Err(error) if change == Some(OutageChange::Began) => {
                warn!(error = %error_chain(&error), "watch of clients broke and is begun again");
            }
            Err(_) => {}
        }
    }
}

fn pod_name(pod: &DynamicObject) -> NamespacedName {
    NamespacedName::new(pod.namespace().unwrap_or_default(), pod.name_any())
}
