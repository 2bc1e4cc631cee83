//! Pure: manifests on the local platform. Without an API server, the controller itself sets generations and UIDs.

use std::sync::Arc;

use common::wire::NamespacedName;
use tracing::info;

use super::{ControllerStateMachine, ObjectsToStore, allocate};
use crate::model::cluster_state::{
    AppRevision, AppState, ConfigurationState, ObjectMetaSummary, RouteState, ServiceManifest,
    ServiceState, Uid, UnixMillis,
};

impl ControllerStateMachine {
    /// Applies a manifest of a Service, which creates or changes its app. An unchanged one changes nothing.
    pub(super) fn apply_manifest(
        &mut self,
        name: NamespacedName,
        mut manifest: ServiceManifest,
        now: UnixMillis,
    ) {
        // Equal templates share their memory: most Revisions of a service differ in little, and most manifests not at
        // all.
        manifest.template = self.cluster.template_cache.intern(&manifest.template);
        let previous = self.cluster.apps.get(&name).map(|app| AppState::clone(app));
        if let Some(revision) = previous.as_ref().and_then(|app| find_name_conflict(app, &manifest))
        {
            let reason = format!(
                "Saw the following changes without a name change (-old +new): spec.template.metadata.name (give another name than {revision:?}, or none)"
            );
            return self.refuse_manifest(name, &reason, now);
        }
        let mut app = self.app_to_change(previous.as_ref(), &name, now);
        if !apply_manifest_to_app(&mut app, manifest, &name) {
            return;
        }
        allocate::allocate(&mut app, &name, &mut self.cluster);
        self.replace_app(&name, previous.as_ref(), app, now);
    }

    /// Returns the app that a manifest changes. An app that is being deleted is replaced by a new one, with UIDs of its
    /// own. Its Revisions stay in the new app as deleted ones, so that their pods finish their requests.
    fn app_to_change(
        &mut self,
        previous: Option<&AppState>,
        name: &NamespacedName,
        now: UnixMillis,
    ) -> AppState {
        if let Some(present) = previous.filter(|app| !app.is_terminating()) {
            return present.clone();
        }
        let mut app = self.new_app(name, now);
        app.revisions = previous.map(|leaving| leaving.revisions.clone()).unwrap_or_default();
        app.revisions.iter_mut().for_each(|revision| revision.is_deleted = true);
        app
    }

    /// Puts an app in the place of `previous`, and plans it.
    fn replace_app(
        &mut self,
        name: &NamespacedName,
        previous: Option<&AppState>,
        app: AppState,
        now: UnixMillis,
    ) {
        self.update_owner_exceptions(name, previous, Some(&app));
        self.cluster.apps.insert(name.clone(), Box::new(app));
        self.reconcile_changed_app(name, previous, ObjectsToStore::All, now);
    }

    fn new_app(&mut self, name: &NamespacedName, now: UnixMillis) -> AppState {
        self.apps_created += 1;
        // A service that is deleted and created again gets other UIDs.
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
        let mut app = self.app_to_change(previous.as_ref(), &name, now);
        info!(service = %name, why = reason, "manifest refused");
        if let Some(service) = &mut app.service {
            service.manifest_error = Some(reason.into());
        }
        self.replace_app(&name, previous.as_ref(), app, now);
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

/// Returns the Revision with the name that the manifest sets, if it has another template. A deleted Revision has its
/// name until its pods have finished their requests.
fn find_name_conflict(app: &AppState, manifest: &ServiceManifest) -> Option<Box<str>> {
    let named = app.revision(manifest.revision_name.as_ref()?)?;
    let has_name = !app.is_terminating() || !named.pods.is_empty();
    (has_name && named.template != manifest.template).then(|| named.name.clone())
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
    if is_template_changed {
        let present = configuration.meta.generation;
        configuration.meta.generation =
            next_generation(present, &app.revisions, &manifest.template);
    }
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

/// Returns the generation of a Configuration with a new template. `present` is its generation so far; 0: it has had no
/// template yet.
///
/// The name of a Revision follows from its generation. A new service counts on from the Revisions of the deleted one
/// whose pods still drain, because their template may be another. Pods of an equal template serve again.
fn next_generation(present: u32, revisions: &[AppRevision], template: &str) -> u32 {
    let newest = revisions.iter().max_by_key(|it| it.meta.generation);
    match newest {
        Some(newest) if present == 0 && *newest.template == *template => newest.meta.generation,
        _ => present.max(newest.map_or(0, |it| it.meta.generation)) + 1,
    }
}
