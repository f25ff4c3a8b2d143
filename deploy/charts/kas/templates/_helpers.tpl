{{/* Names of objects. */}}
{{- define "kas.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kas.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "kas.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kas.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kas.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kas.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kas.selector" -}}
app.kubernetes.io/name: {{ include "kas.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kas.labels" -}}
{{ include "kas.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kas.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* Names of Secrets: an existing one, or the one that the chart creates. */}}
{{- define "kas.apiSecret" -}}
{{- if .Values.secrets.api.existingSecret -}}
{{- .Values.secrets.api.existingSecret -}}
{{- else if .Values.gitlab.address -}}
{{- .Values.gitlab.existingSecret -}}
{{- else -}}
{{- include "kas.fullname" . }}-api
{{- end -}}
{{- end -}}

{{- define "kas.apiSecretKeys" -}}
{{- if and .Values.gitlab.address (not .Values.secrets.api.existingSecret) -}}
{{- list .Values.gitlab.key | toJson -}}
{{- else -}}
{{- .Values.secrets.api.keys | toJson -}}
{{- end -}}
{{- end -}}

{{- define "kas.privateSecret" -}}
{{- default (printf "%s-private-api" (include "kas.fullname" .)) .Values.secrets.privateApi.existingSecret -}}
{{- end -}}

{{- define "kas.agentsSecret" -}}
{{- default (printf "%s-agents" (include "kas.fullname" .)) .Values.agents.existingSecret -}}
{{- end -}}

{{/* The Secret with users of the endpoint for kubectl; empty: only GitLab, issuers or authorities know its callers. */}}
{{- define "kas.usersSecret" -}}
{{- if .Values.kubernetesApi.enabled -}}
{{- if .Values.kubernetesApi.existingSecret -}}
{{- .Values.kubernetesApi.existingSecret -}}
{{- else if or .Values.kubernetesApi.users (not (or .Values.gitlab.address .Values.kubernetesApi.oidc .Values.kubernetesApi.clientCaConfigMap)) -}}
{{- include "kas.fullname" . }}-users
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether kas uses Redis: for the tracker, or for a sink. Empty: no. */}}
{{- define "kas.usesRedis" -}}
{{- if eq .Values.tracker "redis" -}}
true
{{- else -}}
{{- range .Values.sinks.targets }}{{ if .redis }}true{{ end }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* A sink as kas reads it: with files instead of the objects that hold them. */}}
{{- define "kas.sink" -}}
{{- $sink := deepCopy . -}}
{{- with $sink.webhook -}}
{{- $webhook := omit . "existingSecret" "key" "caConfigMap" -}}
{{- if .existingSecret -}}
{{- $_ := set $webhook "token_file" (printf "/etc/kas/sinks/%s/token/%s" $sink.name (.key | default "token")) -}}
{{- end -}}
{{- if .caConfigMap -}}
{{- $_ := set $webhook "ca_certificate_file" (printf "/etc/kas/sinks/%s/ca/ca.crt" $sink.name) -}}
{{- end -}}
{{- $_ := set $sink "webhook" $webhook -}}
{{- end -}}
{{- toJson $sink -}}
{{- end -}}

{{/* The data of a Secret that the chart creates: its present data, or new secrets. */}}
{{- define "kas.madeSecret" -}}
{{- $there := (lookup "v1" "Secret" .root.Release.Namespace .name) | default dict -}}
{{- $data := $there.data | default dict -}}
{{- range .keys }}
{{ . }}: {{ default (randBytes 32 | b64enc) (get $data .) | quote }}
{{- end -}}
{{- end -}}

{{/* The keys that must match the other objects, and therefore override `config`. */}}
{{- define "kas.ownConfig" -}}
tracker: {{ .Values.tracker }}
agent:
  listen:
    network: tcp
    address: ":8150"
    websocket: {{ .Values.agents.websocket }}
    {{- with .Values.tls.agents.existingSecret }}
    certificate_file: /etc/kas/tls/agents/tls.crt
    key_file: /etc/kas/tls/agents/tls.key
    {{- else }}
    certificate_file: ""
    key_file: ""
    {{- end }}
  {{- if or .Values.agents.configurations .Values.agents.kasFiles }}
  configuration:
    folder: /etc/kas/configurations
    git: ""
  {{- end }}
  {{- if .Values.kubernetesApi.enabled }}
  kubernetes_api:
    listen:
      network: tcp
      address: ":8154"
      {{- if .Values.tls.kubernetesApi.existingSecret }}
      certificate_file: /etc/kas/tls/kubernetes-api/tls.crt
      key_file: /etc/kas/tls/kubernetes-api/tls.key
      {{- else }}
      certificate_file: ""
      key_file: ""
      {{- end }}
      {{- if .Values.kubernetesApi.clientCaConfigMap }}
      client_ca_file: /etc/kas/client-ca/ca.crt
      {{- end }}
      {{- if .Values.kubernetesApi.clientCrlConfigMap }}
      crl_file: /etc/kas/client-crl/crl.pem
      {{- end }}
    users:
      file: {{ ternary "/etc/kas/users/users.yaml" "" (ne (include "kas.usersSecret" .) "") | quote }}
    {{- with .Values.kubernetesApi.oidc }}
    oidc: {{ . | toJson }}
    {{- end }}
    {{- with .Values.kubernetesApi.access }}
    access: {{ . | toJson }}
    {{- end }}
    {{- if .Values.kubernetesApi.page }}
    page: true
    {{- end }}
  {{- end }}
api:
  listen:
    {{- $keys := include "kas.apiSecretKeys" . | fromJsonArray }}
    network: tcp
    address: ":8153"
    authentication_secret_file: /etc/kas/secrets/api/{{ first $keys }}
    authentication_secret_files:
      {{- range rest $keys }}
      - /etc/kas/secrets/api/{{ . }}
      {{- else }} []
      {{- end }}
    {{- with .Values.tls.api.existingSecret }}
    certificate_file: /etc/kas/tls/api/tls.crt
    key_file: /etc/kas/tls/api/tls.key
    {{- else }}
    certificate_file: ""
    key_file: ""
    {{- end }}
private_api:
  listen:
    network: tcp
    address: ":8155"
    authentication_secret_file: /etc/kas/secrets/private-api/{{ first .Values.secrets.privateApi.keys }}
    authentication_secret_files:
      {{- range rest .Values.secrets.privateApi.keys }}
      - /etc/kas/secrets/private-api/{{ . }}
      {{- else }} []
      {{- end }}
    {{- if .Values.tls.privateApi.existingSecret }}
    certificate_file: /etc/kas/tls/private-api/tls.crt
    key_file: /etc/kas/tls/private-api/tls.key
    client_ca_file: {{ ternary "/etc/kas/tls/private-api/ca.crt" "" .Values.tls.privateApi.verifyClients | quote }}
    {{- else }}
    certificate_file: ""
    key_file: ""
    client_ca_file: ""
    {{- end }}
  # Empty: POD_IP is used.
  advertise: ""
{{- if .Values.hooks.enabled }}
hooks:
  listen:
    network: tcp
    address: ":8156"
    {{- if .Values.tls.hooks.existingSecret }}
    certificate_file: /etc/kas/tls/hooks/tls.crt
    key_file: /etc/kas/tls/hooks/tls.key
    {{- else }}
    certificate_file: ""
    key_file: ""
    {{- end }}
  {{- if .Values.hooks.secrets }}
  secrets_dir: /etc/kas/hook-secrets
  {{- end }}
{{- end }}
{{- if .Values.direct.enabled }}
direct:
  listen:
    network: tcp
    address: ":8157"
    {{- if .Values.tls.direct.existingSecret }}
    certificate_file: /etc/kas/tls/direct/tls.crt
    key_file: /etc/kas/tls/direct/tls.key
    {{- else }}
    certificate_file: ""
    key_file: ""
    {{- end }}
  authentication_secret_file: /etc/kas/secrets/direct/{{ .Values.direct.key }}
{{- end }}
{{- if or .Values.sinks.targets .Values.sinks.deny .Values.sinks.allow }}
sinks:
  {{- with .Values.sinks.deny }}
  deny: {{ . | toJson }}
  {{- end }}
  {{- with .Values.sinks.allow }}
  allow: {{ . | toJson }}
  {{- end }}
  {{- with .Values.sinks.targets }}
  targets:
    {{- range . }}
    - {{ include "kas.sink" . }}
    {{- end }}
  {{- end }}
{{- end }}
{{- if include "kas.usesRedis" . }}
{{- if or .Values.redis.address .Values.redis.existingSecret }}
redis:
  {{- with .Values.redis.address }}
  server:
    address: {{ . | quote }}
  {{- end }}
  {{- if .Values.redis.existingSecret }}
  password_file: /etc/kas/secrets/redis/{{ .Values.redis.key }}
  {{- end }}
{{- end }}
{{- end }}
{{- if ne .Values.tracker "redis" }}
discovery:
  kubernetes:
    service: {{ include "kas.fullname" . }}-peers
    namespace: ""
    port: "private-api"
{{- end }}
observability:
  listen:
    network: tcp
    address: ":8151"
  {{- if .Values.page.enabled }}
  page:
    enabled: true
    callers: {{ .Values.page.callers }}
    views: {{ .Values.page.views }}
    {{- with .Values.page.clustersUrl }}
    clusters_url: {{ . | quote }}
    {{- end }}
    hosts: {{ .Values.page.hosts | toJson }}
  {{- end }}
identity:
  {{- if .Values.gitlab.address }}
  file: ""
  {{- else }}
  file: /etc/kas/agents/agents.yaml
  {{- end }}
{{- if .Values.gitlab.address }}
gitlab:
  address: {{ .Values.gitlab.address | quote }}
  authentication_secret_file: /etc/kas/secrets/gitlab/{{ .Values.gitlab.key }}
  ca_certificate_file: {{ ternary "/etc/kas/gitlab-ca/ca.crt" "" (ne .Values.gitlab.caConfigMap "") | quote }}
{{- end }}
{{- end -}}

{{/*
Merges one map into another, in place and recursively. Sprig's mergeOverwrite would keep the first map's value where the
second map has an empty one. Takes a list: the map to change, the map that overrides it.
*/}}
{{- define "kas.overlay" -}}
{{- $theirs := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $theirs $key)) -}}
{{- include "kas.overlay" (list (get $theirs $key) $value) -}}
{{- else -}}
{{- $_ := set $theirs $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The configuration: `config`, overridden by the keys of the chart. */}}
{{- define "kas.config" -}}
{{- $config := omit (deepCopy (.Values.config | default dict)) "discovery" -}}
{{- include "kas.overlay" (list $config (include "kas.ownConfig" . | fromYaml)) -}}
{{- toYaml $config -}}
{{- end -}}

{{/*
The keys of `config` that the chart overrides, one on each line.
Takes a list: the value config, the chart's own keys, the path so far.
*/}}
{{- define "kas.replaced" -}}
{{- $theirs := index . 0 -}}{{- $own := index . 1 -}}{{- $path := index . 2 -}}
{{- range $key, $value := $theirs -}}
{{- if hasKey $own $key -}}
{{- $ours := get $own $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $ours) -}}
{{- include "kas.replaced" (list $value $ours (printf "%s%s." $path $key)) -}}
{{- else if and (ne (toJson $value) (toJson $ours)) (or $value $ours) }}
  {{ $path }}{{ $key }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Removes keys without a value from a map, in place: a section whose keys are all commented out. */}}
{{- define "kas.prune" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $map $key -}}
{{- else if kindIs "map" $value -}}
{{- include "kas.prune" $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The value `config` for templates, without keys that have no value. */}}
{{- define "kas.said" -}}
{{- $config := deepCopy (.Values.config | default dict) -}}
{{- include "kas.prune" $config -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Fails for values that do not fit together, and says what would fit. */}}
{{- define "kas.validate" -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey ($.Values.podLabels | default dict) . -}}
{{- fail (printf "podLabels has %s, by which the objects of this chart select the pods: it follows from nameOverride and the release's name" .) -}}
{{- end -}}
{{- end -}}
{{- $said := include "kas.said" . | fromYaml -}}
{{- if and .Values.gitlab.address (not .Values.gitlab.existingSecret) -}}
{{- fail "gitlab.address is set: gitlab.existingSecret must name the Secret that GitLab shares with kas" -}}
{{- end -}}
{{- if and .Values.gitlab.address (or .Values.agents.list .Values.agents.existingSecret) -}}
{{- fail "gitlab.address is set, so GitLab knows the agents: agents.list and agents.existingSecret must be empty" -}}
{{- end -}}
{{- if ne ($said.tracker | default .Values.tracker) .Values.tracker -}}
{{- fail (printf "config.tracker is %s: set the value tracker instead, because other objects depend on it" $said.tracker) -}}
{{- end -}}
{{- $redis := $said.redis | default dict -}}
{{- $elsewhere := or (hasKey $redis "server") (hasKey $redis "sentinel") (hasKey $redis "cluster") -}}
{{- if and (eq .Values.tracker "redis") (not .Values.redis.address) (not $elsewhere) -}}
{{- fail "tracker: redis needs redis.address, such as redis.example.com:6379, or config.redis with sentinel or cluster" -}}
{{- end -}}
{{- if and (ne .Values.tracker "redis") (include "kas.usesRedis" .) (not .Values.redis.address) (not $elsewhere) -}}
{{- fail "sinks.targets has a sink with redis: it needs redis.address, such as redis.example.com:6379, or config.redis with sentinel or cluster" -}}
{{- end -}}
{{- if and (not (include "kas.usesRedis" .)) (or .Values.redis.address .Values.redis.existingSecret) -}}
{{- fail "redis.address and redis.existingSecret are for tracker: redis, and for sinks with redis" -}}
{{- end -}}
{{- if and .Values.redis.address (or (hasKey $redis "sentinel") (hasKey $redis "cluster")) -}}
{{- fail "redis.address is one server, and config.redis names sentinel or cluster: leave one of them out" -}}
{{- end -}}
{{- if and .Values.agents.list .Values.agents.existingSecret -}}
{{- fail "agents.list and agents.existingSecret are both set: use one of them" -}}
{{- end -}}
{{- if and (hasKey $said "gitlab") (not .Values.gitlab.address) -}}
{{- fail "config.gitlab needs the Secret that GitLab shares with kas: set gitlab.address and gitlab.existingSecret instead" -}}
{{- end -}}
{{- if and .Values.tls.privateApi.verifyClients (not .Values.tls.privateApi.existingSecret) -}}
{{- fail "tls.privateApi.verifyClients needs tls.privateApi.existingSecret, with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- $agents := dict -}}
{{- range .Values.hooks.secrets -}}
{{- $agent := toString (int64 .agent) -}}
{{- if hasKey $agents $agent -}}
{{- fail (printf "hooks.secrets has agent %s twice: put all of its secrets into one Secret" $agent) -}}
{{- end -}}
{{- $_ := set $agents $agent true -}}
{{- end -}}
{{- if and .Values.direct.enabled (not .Values.direct.existingSecret) -}}
{{- fail "direct.enabled needs direct.existingSecret, the Secret with what proxies send" -}}
{{- end -}}
{{- if and (not .Values.direct.enabled) .Values.direct.existingSecret -}}
{{- fail "direct.existingSecret has no effect without direct.enabled" -}}
{{- end -}}
{{- $sinks := dict -}}
{{- range .Values.sinks.targets -}}
{{- if hasKey $sinks .name -}}
{{- fail (printf "sinks.targets has %s twice: each sink has a name of its own" .name) -}}
{{- end -}}
{{- $_ := set $sinks .name true -}}
{{- end -}}
{{- if and (not .Values.hooks.enabled) .Values.hooks.secrets -}}
{{- fail "hooks.secrets has no effect without hooks.enabled" -}}
{{- end -}}
{{- with .Values.kubernetesApi -}}
{{- if and .users .existingSecret -}}
{{- fail "kubernetesApi.users and kubernetesApi.existingSecret are both set: use one of them" -}}
{{- end -}}
{{- if and (not .enabled) (or .users .existingSecret .oidc .clientCaConfigMap .clientCrlConfigMap .access .page .ingress.enabled) -}}
{{- fail "kubernetesApi.users, existingSecret, oidc, clientCaConfigMap, clientCrlConfigMap, access, page and ingress have no effect without kubernetesApi.enabled" -}}
{{- end -}}
{{- if and .clientCaConfigMap (not $.Values.tls.kubernetesApi.existingSecret) -}}
{{- fail "kubernetesApi.clientCaConfigMap needs tls.kubernetesApi.existingSecret: clients present certificates to kas in TLS only" -}}
{{- end -}}
{{- if and .clientCrlConfigMap (not .clientCaConfigMap) -}}
{{- fail "kubernetesApi.clientCrlConfigMap needs kubernetesApi.clientCaConfigMap, the authorities that sign the lists" -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.host) -}}
{{- fail "kubernetesApi.ingress.enabled needs kubernetesApi.ingress.host, the name in the kubeconfig" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host, the name that agents dial" -}}
{{- end -}}
{{- if and (or (and .Values.ingress.enabled (eq .Values.ingress.protocol "websocket")) (and .Values.gateway.enabled (eq .Values.gateway.protocol "websocket"))) (not .Values.agents.websocket) -}}
{{- fail "an ingress or gateway with protocol websocket needs agents.websocket: true" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}
{{- fail "gateway.enabled needs gateway.parentRefs, the Gateways that the route belongs to" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- end -}}

{{/* A duration of kas' configuration (`20s`, `1.5s`, `1m30s`, 0 or empty for the default) in whole seconds, rounded up. */}}
{{- define "kas.seconds" -}}
{{- $text := .value | toString -}}
{{- if or (eq $text "") (eq $text "0") (eq $text "<nil>") }}{{ $text = .default }}{{ end -}}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?(d|h|ms|m|s))+$" $text) -}}
{{- fail (printf "%s is %q: not a duration such as 20s, 1.5s or 1m30s" .name $text) -}}
{{- end -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9]+(\\.[0-9]+)?(d|h|ms|m|s)" $text -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $number := trimSuffix $unit . | float64 -}}
{{- $sum = addf $sum (mulf $number (get (dict "d" 86400.0 "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001) $unit)) -}}
{{- end -}}
{{- ceil $sum | int -}}
{{- end -}}

{{/*
How long a replica continues after SIGTERM, in seconds: `drain.delay` and `drain.timeout`, or `drain.upgrade_grace` if there
are upgraded connections and it is longer.
*/}}
{{- define "kas.drain" -}}
{{- $said := include "kas.said" . | fromYaml -}}
{{- $delay := dig "drain" "delay" "5s" $said -}}
{{- $timeout := dig "drain" "timeout" "30s" $said -}}
{{- $delay = include "kas.seconds" (dict "value" $delay "default" "5s" "name" "config.drain.delay") | int -}}
{{- $timeout = include "kas.seconds" (dict "value" $timeout "default" "30s" "name" "config.drain.timeout") | int -}}
{{- if or .Values.kubernetesApi.enabled (dig "agent" "kubernetes_api" nil $said) -}}
{{- $grace := dig "drain" "upgrade_grace" "10m" $said -}}
{{- $grace = include "kas.seconds" (dict "value" $grace "default" "10m" "name" "config.drain.upgrade_grace") | int -}}
{{- $timeout = max $timeout $grace -}}
{{- end -}}
{{- add $delay $timeout -}}
{{- end -}}

{{- define "kas.grace" -}}
{{- $drain := include "kas.drain" . | int -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- add $drain 15 -}}
{{- else if lt (int .Values.terminationGracePeriodSeconds) $drain -}}
{{- fail (printf "terminationGracePeriodSeconds is %d, below the %d s of config.drain.delay and config.drain.timeout (with config.agent.kubernetes_api, or config.drain.upgrade_grace): a replica that shuts down would be killed with open requests. Shorten those, or leave this empty" (int .Values.terminationGracePeriodSeconds) $drain) -}}
{{- else -}}
{{- .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}
{{- end -}}
