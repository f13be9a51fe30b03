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
{{- $fixed := dict "router" (dict "host" "0.0.0.0") "ray" (dict "address" "auto") -}}
{{- if .Values.jobs.persistent }}{{ $_ := set $fixed "jobs" (dict "dir" "/var/lib/baton/jobs") }}{{ end -}}
{{ mustMergeOverwrite (deepCopy .Values.config) $fixed | toYaml }}
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
{{- end }}

{{- define "baton.volumes" -}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "baton.modelsClaim" . }}}
- name: scratch
  emptyDir: {}
{{- end }}
