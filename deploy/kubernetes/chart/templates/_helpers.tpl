{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels that KubeRay puts on the pods of the cluster, and on that of the head. */}}
{{- define "baton.clusterSelector" -}}
ray.io/cluster: {{ .Release.Name }}
{{- end }}

{{- define "baton.headSelector" -}}
ray.io/cluster: {{ .Release.Name }}
ray.io/node-type: head
{{- end }}

{{- define "baton.port" -}}
{{ dig "router" "port" 8000 .Values.config | int }}
{{- end }}

{{/* Longest time that a request may take, in whole seconds. A pod that ends waits so long for requests. */}}
{{- define "baton.requestTimeout" -}}
{{ dig "router" "request_timeout_s" 600 .Values.config | int }}
{{- end }}

{{- define "baton.modelsClaim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{- define "baton.jobsClaim" -}}
{{ .Values.jobs.existingClaim | default (printf "%s-jobs" .Release.Name) }}
{{- end }}

{{- define "baton.config" -}}
{{- $router := dict "host" "0.0.0.0" -}}
{{- if .Values.secrets.routerTls }}
{{- $_ := dict "certificate" "/etc/baton-router-tls/tls.crt" "key" "/etc/baton-router-tls/tls.key" | set $router "tls" }}
{{- end -}}
{{- $fixed := dict "router" $router "ray" (dict "address" "auto") -}}
{{- if .Values.jobs.persistent }}{{ $_ := set $fixed "jobs" (dict "dir" "/var/lib/baton/jobs") }}{{ end -}}
{{- $folder := "/etc/baton-certificates" -}}
{{- if .Values.secrets.certificates }}
{{- $files := dict "ca" (print $folder "/ca.crt") "certificate" (print $folder "/tls.crt") "key" (print $folder "/tls.key") }}
{{- $_ := set $fixed "security" $files }}
{{- else if .Values.config.security }}
{{- fail "config.security: name the Secret with the certificates in secrets.certificates; the chart sets the files." }}
{{- end -}}
{{ mustMergeOverwrite (deepCopy .Values.config) $fixed | toYaml }}
{{- end }}

{{/* What the endpoint speaks; also the name of its port. */}}
{{- define "baton.scheme" -}}
{{- if dig "router" "tls" false (include "baton.config" . | fromYaml) }}https{{ else }}http{{ end }}
{{- end }}

{{/* Rules for what the configuration names outside the cluster: all hosts, on the ports that it names. */}}
{{- define "baton.configuredEgress" -}}
{{- $defaults := dict "http" 80 "https" 443 "postgresql" 5432 -}}
{{- $ports := list -}}
{{- range list (dig "telemetry" "otlp_endpoint" "" .Values.config) (dig "jobs" "database" "" .Values.config) }}
{{- $url := . | default "" }}
{{- $scheme := regexFind "^[a-z]+:" $url | trimSuffix ":" }}
{{- if hasKey $defaults $scheme }}
{{- /* PostgreSQL allows several hosts. */}}
{{- range regexReplaceAll "^[a-z]+://([^/?]*@)?([^/?]*).*$" $url "${2}" | splitList "," }}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default (get $defaults $scheme) | int) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $ports | uniq }}
- ports: [{port: {{ . }}, protocol: TCP}]
{{- end }}
{{- end }}

{{/* Who may reach the router. */}}
{{- define "baton.clients" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $found := concat $policy.clients $policy.monitoring -}}
{{- range $policy.ingressControllers }}
{{- $label := dict "kubernetes.io/metadata.name" . }}
{{- $found = append $found (dict "namespaceSelector" (dict "matchLabels" $label)) }}
{{- end }}
{{- range $policy.clientNetworks }}
{{- $found = append $found (dict "ipBlock" (dict "cidr" .)) }}
{{- end -}}
{{ $found | toYaml }}
{{- end }}

{{/* What every pod has beside its container. */}}
{{- define "baton.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.container" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- include "baton.containerSecurity" . | nindent 2 }}
env:
  - {name: HOME, value: /home/baton}
  {{- with .Values.secrets.huggingFace }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
  {{- end }}
{{- end }}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The root file system is read-only: all that is written goes into these. */}}
{{- define "baton.mounts" -}}
- {name: models, mountPath: /var/cache/baton}
- {name: shared-memory, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /home/baton, subPath: home}
{{- if .Values.secrets.certificates }}
- {name: certificates, mountPath: /etc/baton-certificates, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "baton.modelsClaim" . }}}
- name: scratch
  emptyDir: {}
{{- with .Values.secrets.certificates }}
# Mode 0440 lets the group of fsGroup read the key, and nobody else.
- name: certificates
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* A probe of the endpoint. The kubelet accepts any certificate. Call it with the context and the path. */}}
{{- define "baton.probe" -}}
{{- $scheme := include "baton.scheme" (index . 0) -}}
{path: {{ index . 1 }}, port: {{ $scheme }}{{ if eq $scheme "https" }}, scheme: HTTPS{{ end }}}
{{- end }}
