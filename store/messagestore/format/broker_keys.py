"""The settings of a RocketMQ broker: which file is a broker's, and which settings in it forbid this project to write.

A broker's own file (`broker.conf`) holds hundreds of settings that do not concern a store; they are ignored. Some
settings say that the broker wants other bytes or offsets than this project writes, or that somebody else may write. The
store of such a broker is opened for reading only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

_KINDS: dict[str, str] = {
    "boolean": """
accountStatsEnable accountStatsPrintZeroValues aclEnable allAckInSyncStateSet allowRecallWhenBrokerNotWriteable
appendAckAsync appendCkAsync appendTopicForTimerDeleteKey asyncLearner asyncSendEnable authenticationEnabled
authorizationEnabled autoCreateSubscriptionGroup autoCreateTopicEnable autoDeleteUnusedStats
autoMessageVersionOnTopicLen brokerFastFailureEnable brokerTopicEnable checkCommitLogOffsetOnRecover
checkCRCOnRecover cleanFileForciblyEnable clearRetryTopicWhenDeleteTopic clientCloseSocketIfTimeout
clientPooledByteBufAllocatorEnable clusterTopicEnable coldCtrStrategyEnable coldDataFlowControlEnable
coldDataScanEnable combineCQEnableCheckSelf combineCQUseRocksdbForLmq commercialEnable compatibleWithOldNameSrv
compressedRegister dataReadAheadEnable debugLockEnable disableCallbackExecutor disableConsumeIfConsumerReadSlowly
disableNettyWorkerGroup diskFallRecorded dispatchFromSenderThread duplicationEnable enableAcceleratedRecovery
enableAsyncReput enableAutoInSyncReplicas enableBatchPush enableBroadcastOffsetStore
enableBuildConsumeQueueConcurrently enableCalcFilterBitMap enableCleanExpiredOffset enableCompaction
enableConnectionMetrics enableConsumeQueueExt enableControllerMode enableCreateSysGroup enabledAppendPropCRC
enableDetailStat enableDLegerCommitLog enableFastChannelEventProcess enableLagAndDlqMetrics enableLiteEventMode
enableLitePopLog enableLmq enableLmqQuota enableLmqStats enableLogConsumeQueueRepeatedlyBuildWhenRecover
enableMessageStoreMetrics enableMixedMessageType enableMultiDispatch enableNetWorkFlowControl
enableNotifyAfterPopOrderLockRelease enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge
enablePopLog enablePopMessageThreshold enablePopMetrics enablePropertyFilter enableReconnectForGoAway
enableRegisterProducer enableRemoteEscape enableRemotingMetrics enableRequestMetrics enableRetryTopicV2
enableRocksDBLog enableRunningFlagsInFlush enableScheduleAsyncDeliver enableScheduleMessageStats
enableShutdownGracefully enableSingleTopicRegister enableSkipLongAwaitingAck enableSlaveActingMaster
enableSplitMetadata enableSplitRegistration enableStatsMetrics enableTransactionMetrics estimateAccumulation
fastFailIfNoBufferInStorePool fetchControllerAddrByDnsLookup fetchNamesrvAddrByAddressServer
fetchNameSrvAddrByDnsLookup filterSupportRetry flushCommitLogTimed forceRegister forceVerifyPropCRC
haFlowControlEnable highSpeedMode inBrokerContainer indexFileReadEnable indexFileWriteEnable indexRocksDBEnable
initPopOffsetByCheckMsgInMem isolateLogEnable iteratorWhenUseRocksdbConsumeQueue liteLagCountMetricsEnable
liteLagLatencyCollectEnable liteLagLatencyMetricsEnable litePullMessageEnable lockInStrictMode longPollingEnable
mappedFileSwapEnable messageIndexEnable messageIndexSafe metricsInDelta migrateAuthFromV1Enabled
notifyConsumerIdsChangedEnable offsetCheckInSlave persistConsumerOffsetIncrementally popConsumerFSServiceInit
popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog popResponseReturnActualRetryTopic
popReviveSkipIfGroupAbsent printChannelGroups priorityOrderAsc putConsumeQueueDataByFileChannel readUnCommitted
realTimeNotifyConsumerChange realTimePersistRocksDBConfig recallMessageEnable recheckReputOffsetFromCq
recoverConcurrently rejectPullConsumerEnable rejectTransactionMessage retrieveMessageFromPopRetryTopicV1
rocksdbCQDoubleWriteEnable scanAvailableNameSrv searchBcqByCacheEnable serverLoadBalancerEnable
serverNettyWorkerGroupEnable serverPooledByteBufAllocatorEnable skipPreOnline skipWhenCKRePutReachMaxTimes
slaveReadEnable storeReplyMessageEnable syncFromLastFile syncMasterFlushOffsetWhenStartup timerEnableCheckMetrics
timerEnableRetryUntilSuccess timerInterceptDelayLevel timerRecallToTimelineEnable timerRecallToTimeWheelEnable
timerRocksDBEnable timerRocksDBStopScan timerSkipUnknownError timerStopEnqueue timerWheelEnable
timerWheelSnapshotFlush traceOn traceTopicEnable transferMsgByHeap transientStorePoolEnable transRocksDBEnable
transWriteOriginTransHalfEnable useABSLock useEpollNativeSelector useMessageFilterForNotification
usePIDColdCtrStrategy useReentrantLockWhenPutMessage useSeparateRetryQueue useSeparateStorePathForRocksdbCQ
useServerSideResetOffset useSingleRocksDBForAllConfigs useStaticSubscription useTLS
validateSystemTopicWhenUpdateTopic wakeCommitWhenPutMessage wakeFlushWhenPutMessage warmMapedFileEnable
writeWithoutMmap
""",
    "int": """
accessMessageInMemoryHotRatio accessMessageInMemoryMaxRatio ackMessageThreadPoolNums ackThreadPoolQueueCapacity
aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond adminBrokerThreadPoolNums
adminBrokerThreadPoolQueueCapacity batchDispatchRequestThreadPoolNums bitMapLengthConsumeQueueExt
brokerElectionPriority brokerHeartbeatInterval brokerPermission cleanOfflineBrokerInterval cleanResourceInterval
clientAsyncSemaphoreValue clientCallbackExecutorThreads clientChannelMaxIdleTimeSeconds
clientManagerThreadPoolQueueCapacity clientManageThreadPoolNums clientOnewaySemaphoreValue clientSocketRcvBufSize
clientSocketSndBufSize clientWorkerThreads combineCQMaxExtraSearchCommitLogFiles commercialBaseCount
commercialBigCount commercialSizePerMsg commercialTimerCount commercialTransCount commitCommitLogLeastPages
commitCommitLogThoroughInterval commitIntervalCommitLog commitLogRecoverMaxNum commitLogSwapMapReserveFileNum
compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal compactionThreadNum
connectTimeoutMillis consumerManagerThreadPoolQueueCapacity consumerManageThreadPoolNums
correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval defaultPopShareQueueNum defaultQueryMaxNum
defaultTopicQueueNums deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval deleteFileBatchMax
destroyMapedFileIntervalForcibly disappearTimeAfterStart diskMaxUsedSpaceRatio diskSpaceCleanForciblyRatio
diskSpaceWarningLevelRatio dispatchCqCacheNum dispatchCqThreads endTransactionPoolQueueCapacity
endTransactionThreadPoolNums expectConsumerNumUseFilter fileReservedTime filterServerNums flushCommitLogLeastPages
flushCommitLogThoroughInterval flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval
flushConsumerOffsetHistoryInterval flushConsumerOffsetInterval flushIntervalCommitLog flushIntervalConsumeQueue
flushLeastPagesWhenWarmMapedFile haHousekeepingInterval haListenPort haMaxGapNotInSync haSendHeartbeatInterval
haSlaveFallbehindMax haTransferBatchSize heartbeatThreadPoolNums heartbeatThreadPoolQueueCapacity inSyncReplicas
listenPort liteLagLatencyTopK litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity
loadBalanceProcessorThreadPoolNums loadBalanceThreadPoolQueueCapacity logicQueueSwapMapReserveFileNum
mappedFileSizeCommitLog mappedFileSizeConsumeQueue mappedFileSizeConsumeQueueExt mappedFileSizeTimerLog
mapperFileSizeBatchConsumeQueue maxAsyncPutMessageRequests maxBatchDeleteFilesNum maxClientEventCount
maxConsumeQueueScan maxDelayTime maxErrorRateOfBloomFilter maxFilterMessageSize maxHashSlotNum maxIndexNum
maxLmqConsumeQueueNum maxMessageFilterNumForNotification maxMessageSize maxMsgsNumBatch maxOffsetMapSize
maxRecoveryCommitlogFiles maxRocksDBIndexQueryDays maxStatsIdleTimeInMinutes maxTopicLength
maxTransferBytesOnMessageInDisk maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
maxTransferCountOnMessageInMemory metricsExportBatchMaxDataPoints metricsOtelCardinalityLimit
metricsPromExporterPort minInSyncReplicas popCkMaxBufferSize popCkOffsetMaxQueueSize popCkStayBufferTime
popCkStayBufferTimeOut popFromRetryProbability popFromRetryProbabilityForPriority popPollingMapExpireTimeSeconds
popPollingMapSize popPollingSize popReviveConcurrency popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead
printChannelGroupsMinNum processReplyMessageThreadPoolNums pullBatchMaxMessageCount pullMessageThreadPoolNums
pullThreadPoolQueueCapacity putMessageFutureThreadPoolNums putMessageTimeout putMsgIndexHightWater
putThreadPoolQueueCapacity queryMessageThreadPoolNums queryThreadPoolQueueCapacity recoverThreadPoolNums
redeleteHangedFileInterval registerBrokerTimeoutMills registerNameServerPeriod replicasPerDiskPartition
replyThreadPoolQueueCapacity reviveQueueNum rocksdbFlushWalFrequency sampleCountThreshold sampleSteps
scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked sendHeartbeatTimeoutMillis
sendMessageThreadPoolNums sendThreadPoolQueueCapacity serverAsyncSemaphoreValue serverCallbackExecutorThreads
serverChannelMaxIdleTimeSeconds serverOnewaySemaphoreValue serverSelectorThreads serverSocketBacklog
serverSocketRcvBufSize serverSocketSndBufSize serverWorkerThreads sharedByteBufferNum shutdownWaitTimeSeconds
slaveTimeout spinLockCollisionRetreatOptimalDegree splitMetadataSize splitRegistrationSize
statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum statefulAuthorizationCacheExpiredSecond
statefulAuthorizationCacheMaxNum syncBrokerMemberGroupPeriod syncFlushTimeout timerColdDataCheckIntervalMs
timerCongestNumEachSlot timerFlushIntervalMs timerGetMessageThreadNum timerMaxDelaySec timerMetricSmallThreshold
timerPrecisionMs timerProgressLogIntervalMs timerPutMessageThreadNum timerReputServiceCorePoolSize
timerReputServiceMaxPoolSize timerReputServiceQueueCapacity timerRocksDBRollIntervalHours timerRocksDBRollRangeHours
timerRollWindowSlot timerWheelSnapshotIntervalMs topicQueueLockNum totalReplicas transactionCheckMax
transactionCheckRocksdbCoreThreads transactionCheckRocksdbMaxThreads transactionCheckRocksdbQueueCapacity
transactionOpBatchInterval transactionOpMsgMaxSize transientStorePoolSize travelCqFileNumWhenGetMessage
updateNameServerAddrPeriod userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond writeBufferHighWaterMark
writeBufferLowWaterMark
""",
    "long": """
broadcastOffsetExpireMaxSecond broadcastOffsetExpireSecond brokerId brokerNotActiveTimeoutMillis cgColdReadThreshold
channelExpiredTimeout channelNotActiveInterval checkSyncStateSetPeriod cleanRocksDBDirtyCQIntervalMin
cleanSwapedMapInterval commitLogForceSwapMapInterval commitLogSwapMapInterval consumerFallbehindThreshold
consumerOffsetUpdateVersionStep controllerHeartBeatTimeoutMills delayOffsetUpdateVersionStep
fetchNamesrvAddrInterval filterDataCleanTimeSpan flushDelayOffsetInterval forwardTimeout globalColdReadThreshold
haMaxTimeSlaveNotCatchup liteEventCheckInterval liteEventFullDispatchDelayTime
liteEventFullDispatchDelayTimeForWildcardGroup liteSubscriptionCheckInterval liteSubscriptionCheckTimeoutMills
liteTtlCheckInterval loadBalancePollNameServerInterval logicQueueForceSwapMapInterval logicQueueSwapMapInterval
maxChecksumRange maxHaTransferByteInSecond maxLiteSubscriptionCount maxPopPollingSize
maxReconnectIntervalTimeSeconds maxSlaveResendLength memTableFlushInterval memTableFlushIntervalMs
metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills metricLoggingExporterIntervalInMills minLiteTTl
osPageCacheBusyTimeOutMills popInflightMessageThreshold popLongPollingForceNotifyInterval reviveAckWaitMs
reviveInterval reviveMaxSlow reviveScanTime rocksdbWalFileRollingThreshold shortPollingTimeMills
startAcceptSendRequestTimeStamp statRocksDBCQIntervalSec subscriptionExpiredTimeout syncBrokerMetadataPeriod
syncControllerMetadataPeriod timerRocksDBPrecisionMs transactionCheckInterval transactionMetricFlushInterval
transactionTimeOut waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue
waitTimeMillsInLitePullQueue waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue
""",
    "double": """
logicalDiskSpaceCleanForciblyThreshold timerRocksDBRollMaxTps timerRocksDBTimeExpiredMaxTps
""",
    "String": """
authConfigPath authenticationMetadataProvider authenticationProvider authenticationStrategy authenticationWhitelist
authorizationMetadataProvider authorizationProvider authorizationStrategy authorizationWhitelist bindAddress
bottomMostCompressionTypeForConsumeQueueStore brokerClusterName brokerConfigPath brokerIP1 brokerIP2 brokerName
brokerRole clusterName combineAssignOffsetCQType combineCQLoadingCQTypes combineCQPreferCQType configBlackList
configManagerVersion configName controllerAddr defaultMessageRequestMode deleteWhen dLegerGroup dLegerPeers
dLegerSelfId flushDiskType haMasterAddress initAuthenticationUser innerClientAuthenticationCredentials
messageDelayLevel messageStorePlugIn metricsExporterType metricsGrpcExporterHeader metricsGrpcExporterTarget
metricsLabel metricsPromExporterHost msgTraceTopicName namesrvAddr preferredLeaderId readOnlyCommitLogStorePaths
regionId rocketmqHome rocksdbCompressionType socksProxyConfig storePathBrokerIdentity storePathCommitLog
storePathDLedgerCommitLog storePathEpochFile storePathRootDir storeType
""",
}
KINDS: dict[str, str] = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}
"""The settings that RocketMQ 4.9 to 5.5 read from a broker's file, each with the Java type that its value is read as:
those of the store, the broker, its network and its access control. `other`: a value that no text is read as.

`tests/interop/test_names.py` compares them with RocketMQ's classes.
"""
_Wanted = tuple[Callable[[str], bool], str]


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.lower() in [allowed.lower() for allowed in values]


_MASTERS = ("ASYNC_MASTER", "SYNC_MASTER")
SEND = "Send the messages to the broker"
_UNWRITABLE: dict[str, _Wanted] = {
    "duplicationEnable": (
        _is("false"),
        "its broker cuts records that do not say from where they were copied. Write to a store without this setting",
    ),
    "enableDLegerCommitLog": (_is("false"), f"its log is DLedger's, in another form and another folder. {SEND}"),
    "enableControllerMode": (
        _is("false"),
        f"its brokers elect a master, and cut what no other one has confirmed. {SEND}",
    ),
    "storeType": (_is("default"), f"its queues are in RocksDB, and only queues in files can be written. {SEND}"),
    "transRocksDBEnable": (
        _is("false"),
        f"which half messages are open is in RocksDB, so nobody else can keep them. {SEND}",
    ),
    "messageStorePlugIn": (
        _is(""),
        f"a plug-in such as tiered storage sees only what the broker itself appends and deletes. {SEND}",
    ),
    "configManagerVersion": (
        _is("v1"),
        f"its topics, groups and offsets are in RocksDB, and would lack what is written here. {SEND}",
    ),
    "rocksdbCQDoubleWriteEnable": (
        _is("false"),
        "its queues are in RocksDB as well, and would lack what is written here. Turn it off in the broker first",
    ),
    "brokerRole": (
        _is(*_MASTERS),
        "a slave's log is a copy of its master's, which would lack what is written here. Write to the master's store",
    ),
}
_LOWER = {key.lower(): key for key in KINDS}
RELEVANT = (
    *_UNWRITABLE,
    "forceVerifyPropCRC",
    "storePathRootDir",
    "storePathCommitLog",
    "readOnlyCommitLogStorePaths",
    "brokerPermission",
    "timerRocksDBEnable",
)
"""The settings whose values `StoreConfig.broker_settings` keeps."""


def broker_key(name: str) -> str | None:
    """RocketMQ's spelling of a key in a broker's file; None if RocketMQ does not know the key."""
    return _LOWER.get(name.lower())


def why_not_written(settings: Mapping[str, str]) -> tuple[str, str] | None:
    """The first setting that forbids this project to write, with the reason and what to do; None if there is none."""
    for key, (allowed, reason) in _UNWRITABLE.items():
        if key in settings and not allowed(settings[key]):
            return key, reason
    return None
