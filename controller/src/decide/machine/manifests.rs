//! Pure: manifests on the local platform. Without an API server, the controller itself sets generations and UIDs.

use std::sync::Arc;

use common::wire::NamespacedName;
use tracing::info;

use super::{ControllerStateMachine, ObjectsToStore, allocate};
use crate::{
    decide::plan,
    model::cluster_state::{
        AppState, ConfigurationState, ObjectMetaSummary, RouteState, ServiceManifest, ServiceState,
        Uid, UnixMillis,
    },
};

impl ControllerStateMachine {
    pub(super) fn apply_manifest(
        &mut self,
        name: NamespacedName,
        mut manifest: ServiceManifest,
        now: UnixMillis,
    ) {
        manifest.template = self.cluster.template_cache.intern(&manifest.template);
        let previous = self.cluster.apps.get(&name).map(|app| AppState::clone(app));
        // An app that is being deleted is replaced by a new one, with UIDs of its own.
        let existing = previous.clone().filter(|app| !app.is_terminating());
        if let Some(revision) = existing.as_ref().and_then(|app| find_name_conflict(app, &manifest))
        {
            let reason = format!(
                "Saw the following changes without a name change (-old +new): spec.template.metadata.name (give another name than {revision:?}, or none)"
            );
            return self.refuse_manifest(name, &reason, now);
        }
        let mut app = existing.unwrap_or_else(|| self.new_app(&name, now));
        if !apply_manifest_to_app(&mut app, manifest, &name) {
            return;
        }
        allocate::allocate(&mut app, &name, &mut self.cluster);
        if let Some(terminating) = previous.as_ref().filter(|app| app.is_terminating()) {
            // The autoscaler still counts the Revision of this name, and sends a decision only if it changes.
            plan::revision::ensure_latest_revision(&mut app, &name, &self.cluster, now);
            for revision in &mut app.revisions {
                revision.scaling.decision =
                    terminating.revision(&revision.name).and_then(|it| it.scaling.decision);
            }
        }
        self.update_owner_exceptions(&name, previous.as_ref(), Some(&app));
        self.cluster.apps.insert(name.clone(), Box::new(app));
        self.reconcile_changed_app(&name, previous.as_ref(), ObjectsToStore::All, now);
    }

    fn new_app(&mut self, name: &NamespacedName, now: UnixMillis) -> AppState {
        self.apps_created += 1;
        let app_number = self.apps_created.to_string();
        let meta = |kind: &str| ObjectMetaSummary {
            uid: Uid::derive(
                self.cluster.uid_seed,
                &[kind, &name.namespace, &name.name, &app_number],
            ),
            generation: 0,
            created: now,
        };
        AppState {
            service: Some(ServiceState { meta: meta("Service"), ..ServiceState::default() }),
            configuration: Some(ConfigurationState {
                meta: meta("Configuration"),
                ..ConfigurationState::default()
            }),
            route: Some(RouteState { meta: meta("Route"), ..RouteState::default() }),
            ..AppState::default()
        }
    }

    pub(super) fn refuse_manifest(&mut self, name: NamespacedName, reason: &str, now: UnixMillis) {
        let previous = self.cluster.apps.get(&name).map(|app| AppState::clone(app));
        let existing = previous.clone().filter(|app| !app.is_terminating());
        let mut app = existing.unwrap_or_else(|| self.new_app(&name, now));
        info!(service = %name, why = reason, "manifest refused");
        if let Some(service) = &mut app.service {
            service.manifest_error = Some(reason.into());
        }
        self.cluster.apps.insert(name.clone(), Box::new(app));
        self.reconcile_changed_app(&name, previous.as_ref(), ObjectsToStore::All, now);
    }

    pub(super) fn delete_app(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(app) = self.cluster.apps.get_mut(name).filter(|app| !app.is_terminating()) else {
            return;
        };
        let previous = AppState::clone(app);
        if let Some(service) = &mut app.service {
            service.is_terminating = true;
        }
        info!(service = %name, "service deleted");
        // The addresses are released after the plan, which removes the routes. Otherwise a new app could get addresses
        // that still lead to this one.
        self.reconcile_changed_app(name, Some(&previous), ObjectsToStore::All, now);
        allocate::release_app(name, &previous, &mut self.cluster);
    }
}

/// Returns the Revision with the name that the manifest sets, if it has another template.
fn find_name_conflict(app: &AppState, manifest: &ServiceManifest) -> Option<Box<str>> {
    let named = app.revision(manifest.revision_name.as_ref()?)?;
    (named.template != manifest.template).then(|| named.name.clone())
}

/// Applies a manifest to an app; each changed object gets a new generation. Returns true if anything changed.
fn apply_manifest_to_app(
    app: &mut AppState,
    manifest: ServiceManifest,
    name: &NamespacedName,
) -> bool {
    let (Some(service), Some(configuration), Some(route)) =
        (&mut app.service, &mut app.configuration, &mut app.route)
    else {
        return false;
    };
    let is_template_changed = service.manifest.template != manifest.template;
    let is_traffic_changed = service.manifest.traffic != manifest.traffic;
    // An unchanged manifest still counts if a refused one came in between: it ends the refusal.
    if service.manifest == manifest && service.manifest_error.is_none() {
        return false;
    }
    configuration.meta.generation += u32::from(is_template_changed);
    route.meta.generation += u32::from(is_traffic_changed);
    service.meta.generation += u32::from(is_template_changed || is_traffic_changed);
    info!(
        service = %name,
        generation = service.meta.generation,
        template = is_template_changed,
        traffic = is_traffic_changed,
        "manifest applied"
    );
    configuration.template = Arc::clone(&manifest.template);
    configuration.revision_name.clone_from(&manifest.revision_name);
    route.traffic_spec = Arc::clone(&manifest.traffic);
    service.manifest = manifest;
    service.manifest_error = None;
    true
}
