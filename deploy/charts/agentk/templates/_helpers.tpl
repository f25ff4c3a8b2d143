{{/* The names of objects. */}}
{{- define "agentk.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "agentk.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "agentk.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "agentk.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "agentk.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "agentk.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "agentk.selector" -}}
app.kubernetes.io/name: {{ include "agentk.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "agentk.labels" -}}
{{ include "agentk.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "agentk.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* The Secret with the token, and the ConfigMap with certificates (empty: none). */}}
{{- define "agentk.tokenSecret" -}}
{{- default (printf "%s-token" (include "agentk.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{- define "agentk.caConfigMap" -}}
{{- if .Values.ca.existingConfigMap -}}
{{- .Values.ca.existingConfigMap -}}
{{- else if .Values.ca.pem -}}
{{- include "agentk.fullname" . }}-ca
{{- end -}}
{{- end -}}

{{/* What the ServiceAccount may do, unless that is the built-in role. */}}
{{- define "agentk.rules" -}}
{{- if eq .Values.rbac.access "read-pods" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- else -}}
{{- toYaml .Values.rbac.rules -}}
{{- end -}}
{{- end -}}

{{/* ClusterRoles belong to no namespace, so that their names must tell releases apart. */}}
{{- define "agentk.roleName" -}}
{{- if eq .Values.rbac.access "read-only" -}}
view
{{- else if .Values.rbac.namespaces -}}
{{- include "agentk.fullname" . -}}
{{- else -}}
{{- printf "%s-%s" .Release.Namespace (include "agentk.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "agentk.policyConfigMap" -}}
{{- if .Values.policy -}}
{{- include "agentk.fullname" . }}-policy
{{- end -}}
{{- end -}}

{{/* A duration in whole seconds, rounded up. */}}
{{- define "agentk.upgradeGrace" -}}
{{- $text := .Values.upgradeGrace | default "5m" -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" $text -1 -}}
{{- $unit := regexFind "[hms]$" . -}}
{{- $sum = add $sum (mul (trimSuffix $unit . | int) (get (dict "h" 3600 "m" 60 "s" 1) $unit)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{- define "agentk.grace" -}}
{{- $least := max 25 (include "agentk.upgradeGrace" . | int) -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add $least 15 -}}
{{- else if lt (int .Values.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, below the %d s that agentk may need (upgradeGrace, at least 25 s): it would be killed with open requests. Shorten upgradeGrace, or leave this empty" (int .Values.terminationGracePeriodSeconds) (int $least)) -}}
{{- else -}}
{{- .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}
{{- end -}}

{{/* Objects that belong to no namespace, so that their names must tell releases apart. */}}
{{- define "agentk.clusterName" -}}
{{- printf "%s-%s" (.Release.Namespace | default "default") (include "agentk.fullname" .) -}}
{{- end -}}

{{/* The arguments: the chart's, but for those that `extraArgs` says in another way, and then these. agentk takes none twice. */}}
{{- define "agentk.args" -}}
{{- $own := list (printf "--kas-address=%s" .Values.kasAddress) (printf "--token-file=/etc/agentk/token/%s" .Values.token.key) -}}
{{- if include "agentk.caConfigMap" . -}}
{{- $own = append $own (printf "--ca-cert-file=/etc/agentk/ca/%s" .Values.ca.key) -}}
{{- end -}}
{{- $own = append $own (printf "--replicas=%d" (int .Values.kasReplicas)) -}}
{{- $own = append $own (printf "--max-tunnels=%d" (int .Values.maxTunnels)) -}}
{{- $own = append $own (printf "--worker-threads=%d" (int .Values.workerThreads)) -}}
{{- $own = append $own "--log-format=json" -}}
{{- if .Values.policy -}}
{{- $own = append $own "--policy-file=/etc/agentk/policy/policy.yaml" -}}
{{- end -}}
{{- with .Values.audit.log -}}
{{- $own = append $own (printf "--audit-log=%s" .) -}}
{{- end -}}
{{- if .Values.audit.commands -}}
{{- $own = append $own "--audit-commands" -}}
{{- end -}}
{{- /* 5m is the default of agentk. */ -}}
{{- if ne (.Values.upgradeGrace | default "5m") "5m" -}}
{{- $own = append $own (printf "--upgrade-grace=%s" .Values.upgradeGrace) -}}
{{- end -}}
{{- $extra := .Values.extraArgs | default list -}}
{{- $flags := list -}}
{{- range $extra -}}
{{- $flags = append $flags (splitList "=" . | first) -}}
{{- end -}}
{{- $args := list -}}
{{- range $own -}}
{{- if not (has (splitList "=" . | first) $flags) -}}
{{- $args = append $args . -}}
{{- end -}}
{{- end -}}
{{- concat $args $extra | toYaml -}}
{{- end -}}

{{/* What does not fit together, as an error that says what would. */}}
{{- define "agentk.validate" -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey ($.Values.podLabels | default dict) . -}}
{{- fail (printf "podLabels has %s, which the objects of this chart select pods by: it is set from nameOverride and the release name" .) -}}
{{- end -}}
{{- end -}}
{{- if not .Values.kasAddress -}}
{{- fail "kasAddress is not set: the address of kas, for example grpcs://kas.example.com or wss://kas.example.com" -}}
{{- end -}}
{{- if and (not .Values.token.existingSecret) (not .Values.token.value) -}}
{{- fail "there is no token: set token.existingSecret to the Secret that contains it" -}}
{{- end -}}
{{- if and .Values.token.existingSecret .Values.token.value -}}
{{- fail "token.existingSecret and token.value are both set: set only one of them" -}}
{{- end -}}
{{- if and .Values.ca.existingConfigMap .Values.ca.pem -}}
{{- fail "ca.existingConfigMap and ca.pem are both set: set only one of them" -}}
{{- end -}}
{{- if and (eq .Values.rbac.access "custom") (not .Values.rbac.rules) -}}
{{- fail "rbac.access is custom: rbac.rules must say what is allowed" -}}
{{- end -}}
{{- if and (ne .Values.rbac.access "custom") .Values.rbac.rules -}}
{{- fail (printf "rbac.rules has an effect only if rbac.access is custom, but it is %s" .Values.rbac.access) -}}
{{- end -}}
{{- if and .Values.audit.commands (or (eq (.Values.audit.log | default "") "off") (not (or .Values.audit.log .Values.policy))) -}}
{{- fail "audit.commands has no effect without an audit log: set audit.log or policy" -}}
{{- end -}}
{{- with .Values.impersonation -}}
{{- if and .enabled (not .users) -}}
{{- fail "impersonation.enabled needs impersonation.users: names, or \"*\" for all users" -}}
{{- end -}}
{{- if and (has "*" (.users | default list)) (gt (len .users) 1) -}}
{{- fail "impersonation.users has \"*\" and other names: \"*\" already means all users" -}}
{{- end -}}
{{- if and .unrestricted (not $.Values.policy) -}}
{{- fail "impersonation.unrestricted allows agentk to impersonate system:masters, so that kas could do everything: set policy too, which limits the groups" -}}
{{- end -}}
{{- if and .unrestricted .groups -}}
{{- fail "impersonation.unrestricted and impersonation.groups are both set: set only one of them" -}}
{{- end -}}
{{- range .groups -}}
{{- if contains "*" . -}}
{{- fail (printf "impersonation.groups has %q: RBAC matches no beginnings of names. List the groups in full, or set impersonation.unrestricted and a policy" .) -}}
{{- end -}}
{{- if eq . "system:masters" -}}
{{- fail "impersonation.groups has system:masters, which may do everything" -}}
{{- end -}}
{{- end -}}
{{- if and .constrained (not .rules) -}}
{{- fail "impersonation.constrained needs impersonation.rules: what agentk may do for impersonated users" -}}
{{- end -}}
{{- if and .rules (not .constrained) -}}
{{- fail "impersonation.rules has an effect only with impersonation.constrained" -}}
{{- end -}}
{{- range .rules -}}
{{- if and .nonResourceURLs $.Values.impersonation.namespaces -}}
{{- fail (printf "impersonation.rules names nonResourceURLs (%s), which belong to no namespace: leave impersonation.namespaces empty, or remove them" (join ", " .nonResourceURLs)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.admissionPolicy -}}
{{- if and .enabled (not (or .namespaces .kinds)) -}}
{{- fail "admissionPolicy.enabled needs admissionPolicy.namespaces or admissionPolicy.kinds: without both, it confines nothing" -}}
{{- end -}}
{{- if and .clusterScoped (not .namespaces) -}}
{{- fail "admissionPolicy.clusterScoped has an effect only with admissionPolicy.namespaces" -}}
{{- end -}}
{{- end -}}
{{- if .Values.rbac.namespaces -}}
{{- range .Values.rbac.rules -}}
{{- if .nonResourceURLs -}}
{{- fail (printf "rbac.rules names nonResourceURLs (%s), which belong to no namespace: leave rbac.namespaces empty, or remove them" (join ", " .nonResourceURLs)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
